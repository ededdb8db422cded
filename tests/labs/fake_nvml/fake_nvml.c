/* A libnvidia-ml.so.1 for tests: the functions the agent calls, values from a text file.
 *
 * KANSOKU_FAKE_NVML names the file; each line is "name gpu value" (gpu -1: every GPU). A value of
 * "unsupported" makes the call answer NVML_ERROR_NOT_SUPPORTED. "lost 3 1" makes every call on
 * GPU 3 answer NVML_ERROR_GPU_IS_LOST. The file is read again when it changes, so a test switches
 * faults on while the agent runs. Signatures follow NVIDIA's published NVML API reference.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef int ret;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15 };
typedef struct { int gpu, mig; } device;
static device devices[64], parts[64][8];

static struct { char name[40]; int gpu; double value; int unsupported; } rows[4096];
static int row_count = 0;
static struct stat seen;

static void refresh(void) {
  const char *path = getenv("KANSOKU_FAKE_NVML");
  struct stat now;
  if (!path || stat(path, &now)) return;
  if (now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
      now.st_size == seen.st_size && now.st_ino == seen.st_ino) return;
  FILE *file = fopen(path, "r");
  if (!file) return;
  seen = now;
  char line[256], value[64];
  row_count = 0;
  while (row_count < 4096 && fgets(line, sizeof line, file))
    if (sscanf(line, "%39s %d %63s", rows[row_count].name, &rows[row_count].gpu, value) == 3) {
      rows[row_count].unsupported = !strcmp(value, "unsupported");
      rows[row_count].value = atof(value);
      row_count++;
    }
  fclose(file);
}

/* The last line that fits wins. */
static ret look(const char *name, int gpu, double fallback, double *out) {
  *out = fallback;
  for (int i = row_count - 1; i >= 0; i--)
    if ((rows[i].gpu == gpu || rows[i].gpu == -1) && !strcmp(rows[i].name, name)) {
      *out = rows[i].value;
      return rows[i].unsupported ? NOT_SUPPORTED : OK;
    }
  return OK;
}

static ret ask(device *d, const char *name, double fallback, double *out) {
  double lost;
  refresh();
  look("lost", d->gpu, 0, &lost);
  return lost ? LOST : look(name, d->gpu, fallback, out);
}

#define NUMBER(function, type, name, fallback)                  \
  ret function(device *d, type *out) {                          \
    double value;                                               \
    ret code = ask(d, name, fallback, &value);                  \
    if (code == OK) *out = (type)value;                         \
    return code;                                                \
  }
#define TEXT(function, format)                                  \
  ret function(device *d, char *out, unsigned size) {           \
    double value;                                               \
    ret code = ask(d, #function, 0, &value);                    \
    if (code == OK) snprintf(out, size, format, d->gpu);        \
    return code;                                                \
  }

ret nvmlInit_v2(void) { return OK; }
ret nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
ret nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(ret code) { return code == LOST ? "GPU is lost" : "Not Supported"; }
ret nvmlSystemGetDriverVersion(char *out, unsigned size) {
  snprintf(out, size, "570.86.15");
  return OK;
}
ret nvmlDeviceGetCount_v2(unsigned *out) {
  double value;
  refresh();
  look("gpus", -1, 8, &value);
  *out = (unsigned)value;
  return OK;
}
ret nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
  if (index >= 64) return INVALID;
  devices[index].gpu = (int)index;
  devices[index].mig = -1;
  *out = &devices[index];
  return OK;
}
TEXT(nvmlDeviceGetUUID, "GPU-00000000-0000-0000-0000-%012d")
TEXT(nvmlDeviceGetName, "NVIDIA H100 80GB HBM3%.0d")
TEXT(nvmlDeviceGetSerial, "16500000%05d")
TEXT(nvmlDeviceGetVbiosVersion, "96.00.89.00.%02d")

typedef struct {
  char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32];
} pci_info;
ret nvmlDeviceGetPciInfo_v3(device *d, pci_info *out) {
  double value;
  ret code = ask(d, "pci", 0, &value);
  if (code != OK) return code;
  memset(out, 0, sizeof *out);
  out->bus = 0x1b + (unsigned)d->gpu * 0x10;
  snprintf(out->bus_id, 32, "00000000:%02X:00.0", out->bus);
  return OK;
}
typedef struct { unsigned long long total, free, used; } memory_info;
ret nvmlDeviceGetMemoryInfo(device *d, memory_info *out) {
  double total, used;
  ret code = ask(d, "memory_total", d->mig < 0 ? 85520809984.0 : 10200547328.0, &total);
  if (code == OK) code = ask(d, "memory_used", d->mig < 0 ? 68719476736.0 : 1073741824.0, &used);
  if (code != OK) return code;
  out->total = (unsigned long long)total;
  out->used = (unsigned long long)used;
  out->free = out->total - out->used;
  return OK;
}
typedef struct { unsigned gpu, memory; } utilisation;
ret nvmlDeviceGetUtilizationRates(device *d, utilisation *out) {
  double gpu, memory;
  ret code = ask(d, "utilisation", 97, &gpu);
  if (code == OK) code = ask(d, "memory_utilisation", 41, &memory);
  if (code != OK) return code;
  out->gpu = (unsigned)gpu;
  out->memory = (unsigned)memory;
  return OK;
}
#define ENGINE(function, name)                                  \
  ret function(device *d, unsigned *out, unsigned *period) {    \
    double value;                                               \
    ret code = ask(d, name, 0, &value);                         \
    if (code == OK) { *out = (unsigned)value; *period = 167000; } \
    return code;                                                \
  }
ENGINE(nvmlDeviceGetEncoderUtilization, "encoder")
ENGINE(nvmlDeviceGetDecoderUtilization, "decoder")
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw", 612345)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw", 700000)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy_mj", 123456789)
ret nvmlDeviceGetTemperature(device *d, int sensor, unsigned *out) {
  double value;
  ret code = sensor ? INVALID : ask(d, "temperature", 61, &value);
  if (code == OK) *out = (unsigned)value;
  return code;
}
ret nvmlDeviceGetTemperatureThreshold(device *d, int kind, unsigned *out) {
  double value;
  ret code = ask(d, "temperature_limit", kind == 0 ? 92 : 87, &value);
  if (code == OK) *out = (unsigned)value;
  return code;
}
static ret clock_of(device *d, int kind, unsigned *out, double fallback) {
  double value;
  ret code = ask(d, kind == 1 ? "sm_clock" : "clock", fallback, &value);
  if (code == OK) *out = (unsigned)value;
  return code;
}
ret nvmlDeviceGetClockInfo(device *d, int kind, unsigned *out) {
  return clock_of(d, kind, out, kind == 2 ? 2619 : 1755);
}
ret nvmlDeviceGetMaxClockInfo(device *d, int kind, unsigned *out) {
  (void)d;
  *out = kind == 2 ? 2619 : 1980;
  return OK;
}
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "clock_reasons", 0)
typedef struct { unsigned long long reference, violation; } violation_time;
ret nvmlDeviceGetViolationStatus(device *d, int policy, violation_time *out) {
  double value;
  char name[40];
  snprintf(name, sizeof name, "violation_%d_ns", policy);
  ret code = ask(d, name, 0, &value);
  if (code == OK) out->violation = (unsigned long long)value;
  return code;
}
ret nvmlDeviceGetTotalEccErrors(device *d, int kind, int counter, unsigned long long *out) {
  double value;
  (void)counter;
  ret code = ask(d, kind ? "ecc_uncorrected" : "ecc_corrected", 0, &value);
  if (code == OK) *out = (unsigned long long)value;
  return code;
}
ret nvmlDeviceGetRemappedRows(device *d, unsigned *c, unsigned *u, unsigned *pending,
                              unsigned *failed) {
  double a, b, p, f;
  ret code = ask(d, "rows_correctable", 0, &a);
  if (code != OK) return code;
  ask(d, "rows_uncorrectable", 0, &b);
  ask(d, "rows_pending", 0, &p);
  ask(d, "rows_failed", 0, &f);
  *c = (unsigned)a; *u = (unsigned)b; *pending = (unsigned)p; *failed = (unsigned)f;
  return OK;
}
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie_generation_max", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie_width_max", 16)
ret nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *out) {
  double value;
  char name[40];
  snprintf(name, sizeof name, "nvlink_up_%u", link);
  ret code = link >= 18 ? INVALID : ask(d, name, 1, &value);
  if (code == OK) *out = (unsigned)value;
  return code;
}
ret nvmlDeviceGetNvLinkErrorCounter(device *d, unsigned link, int kind, unsigned long long *out) {
  double value;
  char name[40];
  snprintf(name, sizeof name, "nvlink_error_%u_%d", link, kind);
  ret code = ask(d, name, 0, &value);
  if (code == OK) *out = (unsigned long long)value;
  return code;
}
typedef struct {
  unsigned field, scope; long long stamp, latency; int type, code;
  union { double d; unsigned ui; unsigned long long ull; } value;
} field_value;
ret nvmlDeviceGetFieldValues(device *d, int count, field_value *values) {
  for (int i = 0; i < count; i++) {
    char name[40];
    double value;
    snprintf(name, sizeof name, "field_%u", values[i].field);
    values[i].code = ask(d, name, values[i].field == 82 ? 71 : 0, &value);
    if (values[i].code == LOST) return LOST;
    values[i].type = 3;
    values[i].value.ull = (unsigned long long)value;
  }
  return OK;
}
ret nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending) {
  double value;
  ret code = ask(d, "mig", 0, &value);
  *now = *pending = (unsigned)value;
  return code;
}
ret nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *out) { (void)d; *out = 7; return OK; }
ret nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned slot, device **out) {
  if (slot >= 2) return 6; /* NVML_ERROR_NOT_FOUND: an empty slot */
  parts[d->gpu][slot].gpu = d->gpu;
  parts[d->gpu][slot].mig = (int)slot;
  *out = &parts[d->gpu][slot];
  return OK;
}
ret nvmlDeviceGetGpuInstanceId(device *d, unsigned *out) { *out = 7 + (unsigned)d->mig; return OK; }
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_info;
ret nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process_info *out) {
  double pid, room = *count;
  ret code = ask(d, "process", 0, &pid);
  if (code != OK) return code;
  *count = pid > 0;
  if (*count > room) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
  if (*count) { out->pid = (unsigned)pid; out->used = 68000000000ULL; out->gi = out->ci = ~0u; }
  return OK;
}
/* GPM: a sample is a copy of the counters at a moment; here just a number. */
typedef struct { unsigned id; ret code; double value; char *text[3]; } gpm_metric;
typedef struct {
  unsigned version, count; void *before, *after; gpm_metric metrics[];
} gpm_get;
ret nvmlGpmSampleAlloc(void **out) { *out = calloc(1, sizeof(int)); return OK; }
ret nvmlGpmSampleFree(void *sample) { free(sample); return OK; }
ret nvmlGpmSampleGet(device *d, void *sample) {
  double value;
  *(int *)sample = d->gpu;
  return ask(d, "gpm", 0, &value);
}
ret nvmlGpmMetricsGet(gpm_get *get) {
  for (unsigned i = 0; i < get->count; i++) {
    char name[40];
    snprintf(name, sizeof name, "gpm_%u", get->metrics[i].id);
    get->metrics[i].code = look(name, *(int *)get->after, 50, &get->metrics[i].value);
  }
  return OK;
}
