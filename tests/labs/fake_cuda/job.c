/* Calls the stand-ins as a job without torch would: waits for a line on stdin, then ten rounds. */
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

int ncclAllReduce(const void*, void*, size_t, int, int, void*, void*);
int ncclAllGather(const void*, void*, size_t, int, void*, void*);
int ncclSend(const void*, size_t, int, int, void*, void*);
int cudaLaunchKernel(const void*, long, long, void**, size_t, void*);
int cudaMemcpyAsync(void*, const void*, size_t, int, void*);
int cudaStreamSynchronize(void*);
int cuLaunchKernel(void);
int cuMemcpyHtoDAsync_v2(unsigned long long, const void*, size_t, void*);
int cuCtxSynchronize(void);

int main(void) {
  if (getchar() == EOF) return 1;
  for (int i = 0; i < 10; i++) {
    cudaMemcpyAsync(NULL, NULL, 4096, 1, NULL);
    cuMemcpyHtoDAsync_v2(0, NULL, 100, NULL);
    cudaLaunchKernel(NULL, 0, 0, NULL, 0, NULL);
    cuLaunchKernel();
    ncclAllReduce(NULL, NULL, 1000, 7, 0, NULL, NULL);
    ncclAllGather(NULL, NULL, 10, 9, NULL, NULL);
    ncclSend(NULL, 6, 7, 3, NULL, NULL);
    cudaStreamSynchronize(NULL);
    cuCtxSynchronize();
    usleep(40000);
  }
  return 3;
}
