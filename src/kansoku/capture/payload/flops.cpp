// The products of one forward as torch's dispatcher sees them, for the model's FLOPs.
//
// An observer of the calling thread (at::RecordFunction, what torch's own profiler uses) stands only
// while a forward is counted, the first of its input's shape. It looks at the shapes of every
// operator that enters the dispatcher: below Python, so whatever the modules are called, and also
// what compiled code calls; it changes no tensor, no graph and no guard of a compiler.
//
// Tensor parallelism: a product on whole weights is repeated on every rank of the group and counts
// its share, so that the sum over ranks is the model's once. Which products are split is followed
// through the data: a local tensor smaller than the DTensor it stands for is a part, as is all that
// is computed from a part, until a collective gathers or reduces it.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;
using Tensors = std::vector<at::Tensor>;
enum Family { kMatrix, kAttention, kFamilies };

constexpr size_t kMaxParts = 1 << 20;

struct Frame {
  const char* name;
  bool foreign;                 // on a subclass that hands on to other tensors, such as DTensor
  std::vector<int64_t> counts;  // elements of its tensors
};

struct Count {
  double share = 1;
  double flops[kFamilies] = {0, 0};
  double calls[kFamilies] = {0, 0};
  double traced = 0;  // products that only find out shapes
  int inside = 0;     // a counted operator calls others
  std::vector<Frame> frames;
  // A weak reference keeps the address from being used again, and no memory of the tensor's data.
  std::unordered_map<c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>> parts;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
};

thread_local std::unique_ptr<Count> t_count;

struct Context : at::ObserverContext {
  bool counted = false, framed = false, part = false, whole = false;
};

// -- tensors ---------------------------------------------------------------------------------------

void collect(const c10::IValue& value, Tensors& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) collect(item, found);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) collect(item, found);
  }
}

bool is_foreign(const at::Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::FuncTorchBatched) ||
         keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
         keys.has(c10::DispatchKey::Functionalize);
}

void mark(Count& count, const at::Tensor& tensor) {
  if (count.parts.size() >= kMaxParts) return;
  count.parts.emplace(tensor.unsafeGetTensorImpl(),
                      c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()));
}

// -- FLOPs of one operator, from its arguments ------------------------------------------------------

const at::Tensor& tensor_at(Inputs in, size_t place) { return in.at(place).toTensor(); }
double size_of(const at::Tensor& tensor, int64_t axis) {
  return static_cast<double>(tensor.size(axis));
}
double elements(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }

double linear(Inputs in) {
  const at::Tensor& weight = tensor_at(in, 1);
  return 2 * elements(tensor_at(in, 0)) * (weight.dim() == 2 ? size_of(weight, 0) : 1);
}

template <size_t first>
double product(Inputs in) {  // (…, rows, inner) by (…, inner, columns)
  return 2 * elements(tensor_at(in, first)) * size_of(tensor_at(in, first + 1), -1);
}

template <size_t first>
double vector_product(Inputs in) {
  return 2 * elements(tensor_at(in, first));
}

double grouped(Inputs in) {  // every row, or every column, belongs to one of the groups
  const at::Tensor &left = tensor_at(in, 0), &right = tensor_at(in, 1);
  if (left.dim() == 3 && right.dim() == 2)
    return 2 * size_of(left, 1) * size_of(left, 2) * size_of(right, 1);
  return 2 * elements(left) * size_of(right, -1);
}

double convolution(Inputs in) {
  const at::Tensor &entering = tensor_at(in, 0), &weight = tensor_at(in, 1);
  const auto stride = in.at(3).toIntVector(), padding = in.at(4).toIntVector(),
             dilation = in.at(5).toIntVector();
  double places = size_of(entering, 0);
  for (int64_t axis = 2; axis < entering.dim(); ++axis) {
    auto of = [axis](const std::vector<int64_t>& values) {
      return values.size() == 1 ? values[0] : values.at(axis - 2);
    };
    int64_t size = entering.size(axis);
    if (!in.at(6).toBool())  // a transposed one multiplies every place that enters
      size = (size + 2 * of(padding) - of(dilation) * (weight.size(axis) - 1) - 1) / of(stride) + 1;
    places *= static_cast<double>(size);
  }
  return 2 * places * elements(weight);
}

double scores_and_values(const at::Tensor& q, double keys, const at::Tensor& v) {
  return 2 * keys * (elements(q) + elements(q) / size_of(q, -1) * size_of(v, -1));
}

double attention(Inputs in) {  // (batch, heads, sequence, width of a head)
  return scores_and_values(tensor_at(in, 0), size_of(tensor_at(in, 1), -2), tensor_at(in, 2));
}

// (batch, sequence, heads, width), or (all tokens, heads, width) of packed sequences, whose starts
// are on the device: their mean length counts.
double attention_by_rows(Inputs in) {
  const at::Tensor &q = tensor_at(in, 0), &k = tensor_at(in, 1), &v = tensor_at(in, 2);
  double keys = q.dim() == 4 ? size_of(k, 1) : size_of(k, 0);
  bool packed = q.dim() == 3 || q.size(0) == 1;
  for (size_t place = 3; packed && place < in.size(); ++place) {
    if (!in[place].isTensor() || !in[place].toTensor().defined()) continue;
    const at::Tensor& starts = in[place].toTensor();
    if (starts.dim() != 1 || starts.is_floating_point() || starts.size(0) < 2) continue;
    keys /= size_of(starts, 0) - 1;
    break;
  }
  return scores_and_values(q, keys, v);
}

double recurrent(Inputs in) {  // every token passes every weight once
  Tensors weights;
  for (size_t place = in.size(); place-- > 0;) {
    if (!in[place].isTensorList()) continue;
    collect(in[place], weights);
    break;
  }
  const at::Tensor& entering = tensor_at(in, 0);
  double total = 0;
  for (const at::Tensor& weight : weights)
    if (weight.dim() == 2) total += elements(weight);
  return 2 * elements(entering) / size_of(entering, -1) * total;
}

struct Rule {
  double (*flops)(Inputs);
  Family family;
};

const std::unordered_map<std::string_view, Rule>& rules() {
  static const std::unordered_map<std::string_view, Rule> known = {
      {"aten::linear", {linear, kMatrix}},
      {"aten::mm", {product<0>, kMatrix}},
      {"aten::_int_mm", {product<0>, kMatrix}},
      {"aten::_scaled_mm", {product<0>, kMatrix}},
      {"aten::_scaled_mm_v2", {product<0>, kMatrix}},
      {"aten::addmm", {product<1>, kMatrix}},
      {"aten::addmm_", {product<1>, kMatrix}},
      {"aten::_addmm_activation", {product<1>, kMatrix}},
      {"aten::mv", {vector_product<0>, kMatrix}},
      {"aten::addmv", {vector_product<1>, kMatrix}},
      {"aten::addmv_", {vector_product<1>, kMatrix}},
      {"aten::bmm", {product<0>, kAttention}},
      {"aten::baddbmm", {product<1>, kAttention}},
      {"aten::baddbmm_", {product<1>, kAttention}},
      {"aten::addbmm", {product<1>, kAttention}},
      {"aten::_grouped_mm", {grouped, kMatrix}},
      {"aten::_scaled_grouped_mm", {grouped, kMatrix}},
      {"aten::_scaled_grouped_mm_v2", {grouped, kMatrix}},
      {"aten::convolution", {convolution, kMatrix}},
      {"aten::_convolution", {convolution, kMatrix}},
      {"aten::convolution_overrideable", {convolution, kMatrix}},
      {"aten::lstm", {recurrent, kMatrix}},
      {"aten::gru", {recurrent, kMatrix}},
      {"aten::rnn_tanh", {recurrent, kMatrix}},
      {"aten::rnn_relu", {recurrent, kMatrix}},
      {"aten::scaled_dot_product_attention", {attention, kAttention}},
      {"aten::_scaled_dot_product_attention_math", {attention, kAttention}},
      {"aten::_scaled_dot_product_flash_attention", {attention, kAttention}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", {attention, kAttention}},
      {"aten::_scaled_dot_product_efficient_attention", {attention, kAttention}},
      {"aten::_scaled_dot_product_cudnn_attention", {attention, kAttention}},
      {"aten::_scaled_dot_product_fused_attention_overrideable", {attention, kAttention}},
      {"aten::_flash_attention_forward", {attention_by_rows, kAttention}},
      {"aten::_efficient_attention_forward", {attention_by_rows, kAttention}},
      {"aten::_cudnn_attention_forward", {attention_by_rows, kAttention}},
  };
  return known;
}

// Attention kernels of other packages, such as flash_attn::_flash_attn_forward.
bool is_attention_kernel(std::string_view name, Inputs in) {
  auto has = [name](std::string_view part) { return name.find(part) != name.npos; };
  if (name.substr(0, 6) == "aten::" || has("bwd") || has("backward")) return false;
  if (!(has("flash") || has("attention")) || !(has("fwd") || has("forward"))) return false;
  if (in.size() < 3) return false;
  for (size_t place = 0; place < 3; ++place) {
    if (!in[place].isTensor() || !in[place].toTensor().defined()) return false;
    const at::Tensor& tensor = in[place].toTensor();
    if (!tensor.is_floating_point() || tensor.dim() < 3 || tensor.dim() > 4) return false;
  }
  return true;
}

Rule find_rule(const char* name, Inputs in) {
  const auto found = rules().find(name);
  if (found != rules().end()) return found->second;
  if (is_attention_kernel(name, in)) return {attention_by_rows, kAttention};
  return {nullptr, kMatrix};
}

// -- parts of tensor parallelism --------------------------------------------------------------------

// A collective after which every rank of its group holds the same.
bool makes_whole(std::string_view name) {
  if (name.find("c10d") == name.npos) return false;
  auto has = [name](std::string_view part) { return name.find(part) != name.npos; };
  return has("all_gather") || has("allgather") || has("all_reduce") || has("allreduce") ||
         has("broadcast");
}

// The same operator as the one on DTensors that it stands for: a smaller tensor is a part.
void compare_with_whole(Count& count, const char* name, const Tensors& tensors) {
  for (auto frame = count.frames.rbegin(); frame != count.frames.rend(); ++frame) {
    // What is no operator only stands between: torch's own notes, functions of autograd.
    if (!frame->foreign || std::strstr(frame->name, "::") == nullptr) continue;
    if (std::strcmp(frame->name, name) != 0 || frame->counts.size() != tensors.size()) return;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].numel() < frame->counts[i]) mark(count, tensors[i]);
    return;
  }
}

void follow(Count& count, const char* name, const Tensors& tensors, bool foreign,
            Context& context) {
  context.whole = makes_whole(name);
  if (!foreign) compare_with_whole(count, name, tensors);
  for (const at::Tensor& tensor : tensors)
    context.part = context.part || count.parts.count(tensor.unsafeGetTensorImpl()) > 0;
  Frame frame{name, foreign, {}};
  if (foreign)
    for (const at::Tensor& tensor : tensors) frame.counts.push_back(tensor.numel());
  count.frames.push_back(std::move(frame));
  context.framed = true;
}

// -- the observer -----------------------------------------------------------------------------------

void add_product(Count& count, const Rule& rule, Inputs in, const Tensors& tensors, bool foreign,
                 Context& context) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_meta()) continue;
    count.traced += 1;
    return;
  }
  if (foreign) return;  // what it hands on to counts
  count.flops[rule.family] += rule.flops(in) * (context.part ? 1 : count.share);
  count.calls[rule.family] += 1;
  count.inside += 1;
  context.counted = true;
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
  Count* count = t_count.get();
  if (count == nullptr || count->inside > 0) return nullptr;
  std::unique_ptr<Context> context;
  try {
    if (torch::autograd::get_current_graph_task_id() >= 0) return nullptr;  // a backward in it
    const char* name = function.name();
    Inputs in = function.inputs();
    if (in.size() > function.num_inputs()) in = in.slice(in.size() - function.num_inputs());
    const Rule rule = find_rule(name, in);
    const bool follows = count->share < 1;
    if (rule.flops == nullptr && !follows) return nullptr;
    context = std::make_unique<Context>();
    Tensors tensors;
    for (const c10::IValue& value : in) collect(value, tensors);
    bool foreign = false;
    for (const at::Tensor& tensor : tensors) foreign = foreign || is_foreign(tensor);
    if (follows) follow(*count, name, tensors, foreign, *context);
    if (rule.flops != nullptr) add_product(*count, rule, in, tensors, foreign, *context);
  } catch (...) {  // an operator of another shape than ours: what it calls may be known
  }
  return context;
}

void ends(const at::RecordFunction& function, at::ObserverContext* observer) {
  Count* count = t_count.get();
  if (count == nullptr || observer == nullptr) return;
  const auto* context = static_cast<Context*>(observer);
  if (context->counted) count->inside -= 1;
  if (!context->framed) return;
  if (!count->frames.empty()) count->frames.pop_back();
  if (!context->part && !context->whole) return;
  try {
    Tensors tensors;
    for (const c10::IValue& value : function.outputs()) collect(value, tensors);
    for (const at::Tensor& tensor : tensors) {
      if (context->whole) count->parts.erase(tensor.unsafeGetTensorImpl());
      else if (!is_foreign(tensor)) mark(*count, tensor);
    }
  } catch (...) {
  }
}

}  // namespace

extern "C" {

// What was counted so far: FLOPs of matrix products and of attention and other batched products,
// how many of each there were, and how many only found out shapes.
void kansoku_flops_read(double* found) {
  if (!t_count) return;
  for (int family = 0; family < kFamilies; ++family) {
    found[family] = t_count->flops[family];
    found[kFamilies + family] = t_count->calls[family];
  }
  found[2 * kFamilies] = t_count->traced;
}

// Stop counting on this thread.
void kansoku_flops_end() {
  if (!t_count) return;
  try {
    at::removeCallback(t_count->handle);
  } catch (...) {
  }
  t_count.reset();
}

// Count what this thread calls from now on; products on whole tensors by `share`. 0, or 1 without.
int kansoku_flops_begin(double share) {
  kansoku_flops_end();
  try {
    t_count = std::make_unique<Count>();
    t_count->share = share;
    t_count->handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begins, ends)
            .scopes({at::RecordScope::FUNCTION})
            .needsInputs(true)
            .needsOutputs(share < 1));
    return 0;
  } catch (...) {
    t_count.reset();
    return 1;
  }
}

// A tensor (Python's `_cdata`) that is this rank's part of a weight.
void kansoku_flops_part(void* tensor) {
  if (!t_count || tensor == nullptr) return;
  auto* impl = static_cast<c10::TensorImpl*>(tensor);
  auto held = c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(impl);
  t_count->parts.emplace(impl, c10::weak_intrusive_ptr<c10::TensorImpl>(held));
}
}
