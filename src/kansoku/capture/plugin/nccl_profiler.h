/* NCCL's profiler interface, version 4, as its public description gives it (NCCL 2.27 and newer).
 * Declarations of our own: names and order of members are the interface, nothing else is taken. */
#ifndef KANSOKU_NCCL_PROFILER_H
#define KANSOKU_NCCL_PROFILER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef int nccl_result; /* 0 is success; anything else from init switches the plugin off */
typedef void (*nccl_logger)(int level, unsigned long flags, const char* file, int line,
                            const char* format, ...);

enum {
  EVENT_GROUP = 1 << 0,
  EVENT_COLLECTIVE = 1 << 1,
  EVENT_PAIR = 1 << 2,
  EVENT_PROXY_OP = 1 << 3,
  EVENT_PROXY_STEP = 1 << 4,
  EVENT_PROXY_CONTROL = 1 << 5,
  EVENT_KERNEL_CHANNEL = 1 << 6,
  EVENT_NET_PLUGIN = 1 << 7,
};

enum { STATE_KERNEL_CHANNEL_STOP = 22 };

typedef struct {
  uint8_t type;
  void* parent; /* of a kernel channel: the handle of its collective */
  int rank;
  union {
    struct {
      uint64_t sequence;
      const char* function;
      const void* send_buffer;
      void* receive_buffer;
      size_t count;
      int root;
      const char* datatype;
      uint8_t channels;
      uint8_t warps;
      const char* algorithm;
      const char* protocol;
    } collective;
    struct {
      const char* function;
      void* buffer;
      const char* datatype;
      size_t count;
      int peer;
      uint8_t channels;
    } pair;
    struct {
      pid_t pid;
      uint8_t channel;
      int peer, steps, chunk_bytes, sends;
    } proxy_op;
    struct {
      int step;
    } proxy_step;
    struct {
      uint8_t channel;
      uint64_t device_ns; /* the GPU's global timer when the kernel began there */
    } kernel_channel;
    struct {
      int64_t id;
      void* data;
    } net_plugin;
  };
} nccl_event_description;

typedef union {
  struct {
    size_t bytes;
  } proxy_step;
  struct {
    int appended;
  } proxy_control;
  struct {
    void* data;
  } net_plugin;
  struct {
    uint64_t device_ns;
  } kernel_channel;
} nccl_state_arguments;

typedef struct {
  const char* name;
  nccl_result (*init)(void** context, int* mask, const char* communicator, uint64_t hash, int nodes,
                      int ranks, int rank, nccl_logger log);
  nccl_result (*start_event)(void* context, void** handle, nccl_event_description* description);
  nccl_result (*stop_event)(void* handle);
  nccl_result (*record_state)(void* handle, int state, nccl_state_arguments* arguments);
  nccl_result (*finalize)(void* context);
} nccl_profiler;

#endif
