// Collectives as torch's own dispatcher and process groups see them, written into lane 1 of the
// ring. Every collective, whoever issues it (Python, DDP's reducer, FSDP2, functional collectives),
// passes a c10d:: operator: a pass-through kernel on the BackendSelect key, where c10d has none, stamps
// the arrival, the group, the bytes and the dtype, and goes on to the kernel that was there before.
// That key lies just above the devices' own: tracing never comes here, execution always does, also
// below autograd (DTensor) and in inference mode.
// The end comes from the future of the Work that comes back; sends and receives have none, but open
// a RecordFunction ("gloo:send") that ends when they are waited for. Its callback is of USER_SCOPE, so
// no ordinary operator pays for it, and stands only once something was sent or received: while it
// stands, Gloo copies the thread's state twice for every collective. Byte layout: docs/formats/ring.md.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

struct Record {
  uint64_t id;
  int64_t start, cpu, duration;
  uint64_t parent;
  int32_t step;
  uint16_t kind, flags, name, group, dtype, device, attributes, peer;
  uint32_t thread;
  int64_t sequence, bytes, rss, device_ns;
  double value_a, value_b;
  uint64_t origin, id_again;
};
static_assert(sizeof(Record) == 128, "the record of docs/formats/ring.md");

constexpr int kCollective = 6, kWait = 11;
constexpr uint16_t kFailed = 8, kAsync = 16, kNoTimes = 32;
constexpr int kNow = 144, kCounters = 384;

// Which arguments hold the bytes, in the convention of nccl-tests: what a rank ends up with in a
// gather, what it starts with in a scatter.
enum Size { kFirst, kSecond, kFirstTimesRanks, kSecondTimesRanks, kZero };
struct Op {
  const char* op;
  const char* name;
  Size size;
  int peer;              // index of the peer argument of a point-to-point operation, -1 otherwise
  bool no_future = false;  // ends by its RecordFunction
};
constexpr Op kOps[] = {
    {"allreduce_", "all_reduce", kFirst, -1},
    {"allreduce_coalesced_", "all_reduce", kFirst, -1},
    {"broadcast_", "broadcast", kFirst, -1},
    {"reduce_", "reduce", kFirst, -1},
    {"allgather_", "all_gather", kFirst, -1},
    {"_allgather_base_", "all_gather", kFirst, -1},
    {"allgather_coalesced_", "all_gather", kFirst, -1},
    {"allgather_into_tensor_coalesced_", "all_gather", kFirst, -1},
    {"reduce_scatter_", "reduce_scatter", kSecond, -1},
    {"_reduce_scatter_base_", "reduce_scatter", kSecond, -1},
    {"reduce_scatter_tensor_coalesced_", "reduce_scatter", kSecond, -1},
    {"alltoall_base_", "all_to_all", kSecond, -1},
    {"alltoall_", "all_to_all", kSecond, -1},
    {"gather_", "gather", kSecondTimesRanks, -1},
    {"scatter_", "scatter", kFirstTimesRanks, -1},
    {"send", "send", kFirst, 2, true},
    {"recv_", "recv", kFirst, 2, true},
    {"recv_any_source_", "recv", kFirst, -1, true},
    {"barrier", "barrier", kZero, -1},
    {"monitored_barrier_", "barrier", kZero, -1},
};
constexpr int kOpCount = sizeof(kOps) / sizeof(kOps[0]);

constexpr c10::DispatchKeySet kAfter(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

struct Group {
  uint16_t name = 0;
  uint64_t sequence = 0;
  std::map<std::pair<int, int64_t>, uint64_t> pairs;  // (direction, peer) of point-to-point
};

std::atomic<char*> g_base{nullptr};
uint64_t g_lane_bits, g_offset, g_capacity;
std::atomic<uint64_t> g_next{1};
std::atomic<int64_t> g_last_end{0};
std::atomic<int64_t> g_in_flight{0};
std::atomic<bool> g_brackets{false}, g_watching{false};
uint16_t g_op_names[kOpCount], g_dtypes[64], g_devices[2], g_wait_name, g_finalize_name;
std::mutex g_mutex;
std::unordered_map<std::string, Group> g_groups;
std::unique_ptr<torch::Library> g_c10d, g_functional;
at::CallbackHandle g_callback = at::INVALID_CALLBACK_HANDLE;

thread_local uint64_t t_open = 0;      // collective whose Work is being made on this thread
thread_local int t_graph_task = -1;    // backward that already has its bracket
thread_local uint64_t t_bracket = 0;   // open wait of DDP's finalisation

int64_t now_ns(clockid_t clock) {
  timespec stamp;
  clock_gettime(clock, &stamp);
  return stamp.tv_sec * 1000000000LL + stamp.tv_nsec;
}

uint32_t thread_id() {
  thread_local uint32_t id = static_cast<uint32_t>(syscall(SYS_gettid));
  return id;
}

template <typename T>
volatile T& word(char* base, size_t at) {
  return *reinterpret_cast<volatile T*>(base + at);
}

Record* slot(char* base, uint64_t n) {
  return reinterpret_cast<Record*>(base + g_offset + (n - 1) % g_capacity * sizeof(Record));
}

uint64_t open_record(Record record) {
  char* base = g_base.load(std::memory_order_acquire);
  if (base == nullptr) return 0;
  uint64_t n = g_next.fetch_add(1);
  record.id = record.id_again = g_lane_bits | n;
  record.cpu = record.duration = record.rss = record.device_ns = -1;
  record.start = now_ns(CLOCK_MONOTONIC);
  record.step = static_cast<int32_t>(word<int64_t>(base, kNow));
  record.thread = thread_id();
  if (static_cast<int64_t>(record.thread) == word<int64_t>(base, kNow + 16))
    record.parent = word<uint64_t>(base, kNow + 8);
  Record* place = slot(base, n);
  place->id_again = 0;  // a reader must not take a mixture for a record
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(static_cast<void*>(place), &record, offsetof(Record, id_again));
  std::atomic_thread_fence(std::memory_order_release);
  reinterpret_cast<volatile Record*>(place)->id_again = record.id_again;
  word<uint64_t>(base, 256 + 32 + 16) = n;
  return n;
}

void close_record(uint64_t n, uint16_t flags, bool count, int64_t until = 0) {
  char* base = g_base.load(std::memory_order_acquire);
  if (base == nullptr || n == 0) return;
  Record* record = slot(base, n);
  if (record->id != (g_lane_bits | n)) {  // overwritten: say so
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(base + 176), 1, __ATOMIC_RELAXED);
    return;
  }
  int64_t end = until ? until : now_ns(CLOCK_MONOTONIC);
  record->flags |= flags;
  std::atomic_thread_fence(std::memory_order_release);
  int64_t duration = end - record->start;
  reinterpret_cast<volatile Record*>(record)->duration = duration > 0 ? duration : 0;
  auto* counter = reinterpret_cast<uint64_t*>(base + kCounters + 16 * record->kind);
  __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
  if (count && record->bytes > 0)
    __atomic_fetch_add(counter + 1, static_cast<uint64_t>(record->bytes), __ATOMIC_RELAXED);
}

void add_tensors(const c10::IValue& value, int64_t& bytes, const at::Tensor** sample) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    bytes += static_cast<int64_t>(tensor.nbytes());
    if (*sample == nullptr) *sample = &tensor;
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& item : value.toListRef()) add_tensors(item, bytes, sample);
  }
}

// Where the process group and the async flag stand among the arguments; looked up once an operator.
struct Places {
  int group = -1, async = -1;
};

Places find_places(const c10::OperatorHandle& op) {
  Places found;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "process_group") found.group = static_cast<int>(i);
    if (arguments[i].name() == "async_op") found.async = static_cast<int>(i);
  }
  return found;
}

void bracket_ends() {
  uint64_t open = t_bracket;
  t_bracket = 0;
  char* base = g_base.load(std::memory_order_acquire);
  if (open == 0 || base == nullptr) return;
  int64_t now = now_ns(CLOCK_MONOTONIC), last = g_last_end.load();
  int64_t start = slot(base, open)->start;
  // Blocked until the last collective was through; copying the buckets back is backward again. One
  // whose end has not been told yet ended just now: waiters are woken before we are.
  bool told = g_in_flight.load() == 0;
  close_record(open, 0, false, !told ? now : last < start ? start : (last < now ? last : now));
}

// DDP's reducer waits in C++, in a callback that the engine runs after the last gradient. Ours was
// queued at the first collective of the backward, so it runs before; it then queues another after.
void bracket_begins() {
  int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || task == t_graph_task || !g_brackets.load()) return;
  t_graph_task = task;
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([&engine] {
    if (t_bracket != 0) return;  // a backward inside this one made us queue twice
    Record record{};
    record.kind = kWait;
    record.name = g_finalize_name;
    record.sequence = record.bytes = -1;
    t_bracket = open_record(record);
    engine.queue_callback([] { bracket_ends(); });
  });
}

uint64_t arrival(int index, const Places& places, const c10::OperatorHandle& op,
                 const torch::jit::Stack& stack) {
  const Op& known = kOps[index];
  size_t arguments = op.schema().arguments().size();
  size_t first = stack.size() - arguments;
  Record record{};
  record.kind = kCollective;
  if (places.async < 0 || stack[first + places.async].toBool()) record.flags = kAsync;
  record.name = g_op_names[index];
  record.sequence = -1;
  const at::Tensor* sample = nullptr;
  int64_t bytes = 0, ignored = 0;
  bool second = known.size == kSecond || known.size == kSecondTimesRanks;
  add_tensors(stack[first + (second ? 1 : 0)], bytes, &sample);
  if (sample == nullptr && !second && arguments > 1) add_tensors(stack[first + 1], ignored, &sample);
  if (sample != nullptr && known.size != kZero) {
    auto type = static_cast<int>(sample->scalar_type());
    record.dtype = type >= 0 && type < 64 ? g_dtypes[type] : 0;
  }
  if (sample != nullptr) record.device = g_devices[sample->is_cpu() ? 0 : 1];
  if (places.group >= 0) {
    auto group = stack[first + places.group].toCustomClass<c10d::ProcessGroup>();
    if (known.size == kFirstTimesRanks || known.size == kSecondTimesRanks) {
      // Only the root holds the whole list; count the same on every rank.
      int64_t own = 0;
      add_tensors(stack[first + (second ? 1 : 0)], own, &sample);
      bytes = own * group->getSize();
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    Group& state = g_groups[group->getGroupName()];
    record.group = state.name;
    if (known.peer >= 0) {
      int64_t peer = stack[first + known.peer].toInt();
      record.peer = static_cast<uint16_t>(peer + 1);
      record.sequence = static_cast<int64_t>(
          state.pairs[{known.op[0] == 's' ? 0 : 1, peer}]++);
    } else {
      record.sequence = static_cast<int64_t>(state.sequence++);
    }
  }
  record.bytes = known.size == kZero ? 0 : bytes;
  return open_record(record);
}

void ended(uint64_t open) {
  int64_t now = now_ns(CLOCK_MONOTONIC), last = g_last_end.load();
  while (last < now && !g_last_end.compare_exchange_weak(last, now)) {
  }
  close_record(open, 0, true, now);
}

// Close the record when the Work's future completes: at once, or later on the backend's thread.
void completion(int index, uint64_t open, const torch::jit::Stack& stack) {
  try {
    if (stack.empty() || !stack.back().isObject()) return ended(open);  // it blocked until its end
    char* base = g_base.load(std::memory_order_acquire);
    bool host = base != nullptr && slot(base, open)->device == g_devices[0];
    if (host && !kOps[index].no_future) {
      auto future = stack.back().toCustomClass<c10d::Work>()->getFuture();
      if (future) {
        g_in_flight.fetch_add(1);
        try {
          future->addCallback(
              [open](c10::ivalue::Future&) {
                ended(open);
                g_in_flight.fetch_sub(1);
              },
              false);
          return;
        } catch (...) {
          g_in_flight.fetch_sub(1);
        }
      }
    }
  } catch (...) {
  }
  // On a device the host sees only the enqueueing; or the backend has no future.
  close_record(open, kNoTimes, true);
}

struct Context : at::ObserverContext {
  explicit Context(uint64_t n) : open(n) {}
  uint64_t open;
};

std::unique_ptr<at::ObserverContext> work_begins(const at::RecordFunction& function) {
  if (t_open == 0) return nullptr;
  const char* name = function.name();
  if (std::strncmp(name, "gloo:", 5) != 0 && std::strncmp(name, "nccl:", 5) != 0 &&
      std::strncmp(name, "mpi:", 4) != 0 && std::strncmp(name, "ucc:", 4) != 0)
    return nullptr;
  auto context = std::make_unique<Context>(t_open);
  t_open = 0;
  return context;
}

void work_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  ended(static_cast<Context*>(context)->open);
}

void watch_pairs() {
  if (g_watching.load()) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_watching.load()) return;
  g_callback = at::addGlobalCallback(at::RecordFunctionCallback(work_begins, work_ends)
                                         .scopes({at::RecordScope::USER_SCOPE}));
  g_watching.store(true);
}

template <int index>
void collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  uint64_t open = 0;
  try {
    static const Places places = find_places(op);
    if (kOps[index].no_future) watch_pairs();
    open = arrival(index, places, op, *stack);
    bracket_begins();
  } catch (...) {  // ours: costs data only
    if (char* base = g_base.load())
      __atomic_fetch_add(reinterpret_cast<uint64_t*>(base + 184), 1, __ATOMIC_RELAXED);
  }
  uint64_t outer = t_open;
  t_open = kOps[index].no_future ? open : 0;
  try {
    op.redispatchBoxed(keys & kAfter, stack);
  } catch (...) {
    t_open = outer;
    close_record(open, kFailed, true);
    throw;
  }
  bool taken = kOps[index].no_future && t_open != open;  // by its RecordFunction
  t_open = outer;
  if (open != 0 && !taken) completion(index, open, *stack);
}

void wait_tensor(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Record record{};
  record.kind = kWait;
  record.name = g_wait_name;
  record.sequence = record.bytes = -1;
  uint64_t open = open_record(record);
  try {
    op.redispatchBoxed(keys & kAfter, stack);
  } catch (...) {
    close_record(open, kFailed, false);
    throw;
  }
  close_record(open, 0, false);
}

template <int index>
void register_ops(uint64_t mask) {
  if constexpr (index < kOpCount) {
    if (mask >> index & 1) {
      g_c10d->impl(kOps[index].op,
                   torch::dispatch(c10::DispatchKey::BackendSelect,
                                   torch::CppFunction::makeFromBoxedFunction<&collective<index>>()));
    }
    register_ops<index + 1>(mask);
  }
}

}  // namespace

extern "C" {

int kansoku_op_count() { return kOpCount; }
const char* kansoku_op(int index) { return kOps[index].op; }
const char* kansoku_op_name(int index) { return kOps[index].name; }
const char* kansoku_dtype(int type) {
  if (type >= static_cast<int>(c10::ScalarType::NumOptions)) return "";
  return c10::toString(static_cast<c10::ScalarType>(type));
}

void kansoku_ring(char* base, uint64_t lane, uint64_t offset, uint64_t capacity,
                  const uint16_t* op_names, const uint16_t* dtypes, const uint16_t* devices,
                  uint16_t wait_name, uint16_t finalize_name) {
  std::memcpy(g_op_names, op_names, sizeof g_op_names);
  std::memcpy(g_dtypes, dtypes, sizeof g_dtypes);
  std::memcpy(g_devices, devices, sizeof g_devices);
  g_wait_name = wait_name;
  g_finalize_name = finalize_name;
  g_lane_bits = lane << 56;
  g_offset = offset;
  g_capacity = capacity;
  g_next.store(1);
  g_base.store(base, std::memory_order_release);
}

void kansoku_group(const char* name, uint16_t index) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_groups[name].name = index;
}

void kansoku_brackets(int on) { g_brackets.store(on != 0); }

// Register or remove the kernels of the masked operators. Returns 0, or 1 with nothing changed.
int kansoku_enable(uint64_t mask, int wait) {
  try {
    g_c10d = std::make_unique<torch::Library>(torch::Library::IMPL, "c10d", std::nullopt, __FILE__,
                                              __LINE__);
    register_ops<0>(mask);
    if (wait) {
      g_functional = std::make_unique<torch::Library>(torch::Library::IMPL, "_c10d_functional",
                                                      std::nullopt, __FILE__, __LINE__);
      g_functional->impl("wait_tensor",
                         torch::dispatch(c10::DispatchKey::BackendSelect,
                                         torch::CppFunction::makeFromBoxedFunction<&wait_tensor>()));
    }
    return 0;
  } catch (...) {
    g_c10d.reset();
    g_functional.reset();
    return 1;
  }
}

void kansoku_disable() {
  try {
    g_c10d.reset();
    g_functional.reset();
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_watching.exchange(false)) at::removeCallback(g_callback);
  } catch (...) {
  }
}

// Wait until every end has been told, at most so long: a Work wakes who waits for it before it calls
// us, so a process may be at its end while the last record is still open.
void kansoku_settle(int64_t timeout_ns) {
  const timespec pause{0, 200000};
  int64_t deadline = now_ns(CLOCK_MONOTONIC) + timeout_ns;
  while (g_in_flight.load() > 0 && now_ns(CLOCK_MONOTONIC) < deadline) nanosleep(&pause, nullptr);
}

// In a forked child, and at the end: nothing is written any more.
void kansoku_abandon() { g_base.store(nullptr); }

void kansoku_backward_ended() {
  if (t_bracket != 0) bracket_ends();
}
}
