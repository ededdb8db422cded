/* Stand-ins for NCCL and the CUDA runtime and driver: the names and arguments of the calls, nothing
 * behind them. Compiled into libnccl.so.2, libcudart.so.12 and libcuda.so.1 by the test. */
#include <stddef.h>
#include <time.h>

static void take(long nanoseconds) {
  struct timespec time = {0, nanoseconds};
  nanosleep(&time, NULL);
}

#ifdef NCCL
int ncclAllReduce(const void* s, void* r, size_t n, int type, int op, void* comm, void* stream) {
  (void)s, (void)r, (void)n, (void)type, (void)op, (void)comm, (void)stream;
  take(1000);
  return 0;
}
int ncclAllGather(const void* s, void* r, size_t n, int type, void* comm, void* stream) {
  (void)s, (void)r, (void)n, (void)type, (void)comm, (void)stream;
  take(1000);
  return 0;
}
int ncclSend(const void* s, size_t n, int type, int peer, void* comm, void* stream) {
  (void)s, (void)n, (void)type, (void)peer, (void)comm, (void)stream;
  take(1000);
  return 0;
}
/* NCCL exports each name twice; a linker may keep one as the tail of the other. */
int pncclAllReduce(void) { return 0; }
#endif

#ifdef CUDART
int cudaLaunchKernel(const void* f, long a, long b, void** arguments, size_t shared, void* stream) {
  (void)f, (void)a, (void)b, (void)arguments, (void)shared, (void)stream;
  take(1000);
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, void* stream) {
  (void)to, (void)from, (void)n, (void)kind, (void)stream;
  take(1000);
  return 0;
}
int cudaStreamSynchronize(void* stream) {
  (void)stream;
  take(3000000);
  return 0;
}
#endif

#ifdef CUDA
int cuLaunchKernel(void) {
  take(1000);
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t n, void* stream) {
  (void)to, (void)from, (void)n, (void)stream;
  take(1000);
  return 0;
}
int cuCtxSynchronize(void) {
  take(3000000);
  return 0;
}
#endif
