/* A stand-in for the driver's libnvidia-ml.so.1, so that nvidia-ml-py's real binding is exercised where there is no GPU.
 *
 * The functions and structures are those of NVIDIA's nvml.h. Everything is told by environment variables, read at each call:
 *   STAND_IN_GPUS    number of GPUs (0)
 *   STAND_IN_NAMES   their names, separated by '|', any bytes ("Stand-in A100")
 *   STAND_IN_MIG     "0:2 3:0": GPU 0 is split in two parts, GPU 3 is split, but has no part yet
 *   STAND_IN_NVLINK  what the links of every GPU lead to: "switch", "pair" (two each to the other of two GPUs)
 *   STAND_IN_ERRORS  "function=code function@gpu=code ...": what fails; of a part with its GPU
 *   STAND_IN_LOST    after so many starts every question about a GPU gets GPU_IS_LOST, and starting UNINITIALIZED after one more
 *   STAND_IN_LOG     a file that gets a letter for each start (i) and end (s)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, LOST = 15 };
enum { MAX_GPUS = 16, MAX_PARTS = 7, NUM_LINKS = 4 };
#define MIB (1024ull * 1024ull)

typedef struct { int gpu, part; } Handle; /* part: -1 for the whole GPU */
typedef struct { char old_bus[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;

static Handle handles[MAX_GPUS][MAX_PARTS + 1];
static int starts = 0, running = 0;

static int number(const char *name) { const char *value = getenv(name); return value ? atoi(value) : 0; }

static void log_letter(char letter) {
    const char *path = getenv("STAND_IN_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fputc(letter, file); fclose(file); }
}

/* The code that STAND_IN_ERRORS has for `function`, everywhere or on this GPU. */
static int told(const char *function, int gpu) {
    char text[4096], place[160];
    snprintf(text, sizeof text, "%s", getenv("STAND_IN_ERRORS") ? getenv("STAND_IN_ERRORS") : "");
    snprintf(place, sizeof place, "%s@%d", function, gpu);
    for (char *entry = strtok(text, " "); entry; entry = strtok(NULL, " ")) {
        char *code = strchr(entry, '=');
        if (!code) continue;
        *code = 0;
        if (!strcmp(entry, function) || !strcmp(entry, place)) return atoi(code + 1);
    }
    return OK;
}

void forget_starts(void) { starts = 0; }

static int lost(int more) { return getenv("STAND_IN_LOST") && starts > number("STAND_IN_LOST") + more; }

#define ASK(gpu) do { \
    if (!running) return UNINITIALIZED; \
    int code = told(__func__, gpu); \
    if (code) return code; \
    if (gpu >= 0 && lost(0)) return LOST; \
} while (0)
#define ASK_WHOLE(handle) do { ASK((handle)->gpu); if ((handle)->part >= 0) return NOT_SUPPORTED; } while (0)

/* Parts of a split GPU; -1 when it is not split. */
static int parts(int gpu) {
    char text[256], place[16];
    snprintf(text, sizeof text, "%s", getenv("STAND_IN_MIG") ? getenv("STAND_IN_MIG") : "");
    snprintf(place, sizeof place, "%d:", gpu);
    for (char *entry = strtok(text, " "); entry; entry = strtok(NULL, " "))
        if (!strncmp(entry, place, strlen(place))) return atoi(entry + strlen(place));
    return -1;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = told(__func__, -1);
    if (code) return code;
    starts++;
    if (lost(1)) return UNINITIALIZED;
    running++;
    log_letter('i');
    return OK;
}

int nvmlShutdown(void) {
    if (!running) return UNINITIALIZED;
    running--;
    log_letter('s');
    return told(__func__, -1);
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { ASK(-1); snprintf(out, size, "580.65.06"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *out) { ASK(-1); *out = 13010; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { ASK(-1); *out = number("STAND_IN_GPUS"); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **out) {
    ASK((int)index);
    if ((int)index >= number("STAND_IN_GPUS")) return INVALID;
    handles[index][0] = (Handle){index, -1};
    *out = &handles[index][0];
    return OK;
}

int nvmlDeviceGetName(Handle *handle, char *out, unsigned size) {
    ASK(handle->gpu);
    if (handle->part >= 0) { snprintf(out, size, "Stand-in MIG 1g.10gb"); return OK; }
    const char *names = getenv("STAND_IN_NAMES");
    if (!names) { snprintf(out, size, "Stand-in A100"); return OK; }
    for (int skip = handle->gpu; skip > 0 && strchr(names, '|'); skip--) names = strchr(names, '|') + 1;
    size_t length = strcspn(names, "|");
    snprintf(out, size, "%.*s", (int)length, names);
    return OK;
}

int nvmlDeviceGetUUID(Handle *handle, char *out, unsigned size) {
    ASK(handle->gpu);
    if (handle->part < 0) snprintf(out, size, "GPU-%08x-1111-2222-3333-444444444444", 0xabc00000 + handle->gpu);
    else snprintf(out, size, "MIG-%08x-5555-6666-7777-88888888888%d", 0xdef00000 + handle->gpu, handle->part);
    return OK;
}

static void fill_pci(Pci *out, int gpu) {
    memset(out, 0, sizeof *out);
    out->bus = 0x1a + gpu;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
}

int nvmlDeviceGetPciInfo_v3(Handle *handle, Pci *out) { ASK_WHOLE(handle); fill_pci(out, handle->gpu); return OK; }

/* A GPU has 40 GiB and keeps 512 MiB for itself, a part has 10 GiB. */
int nvmlDeviceGetMemoryInfo_v2(Handle *handle, Memory2 *out) {
    ASK(handle->gpu);
    out->reserved = 512 * MIB;
    out->total = (handle->part < 0 ? 40 : 10) * 1024 * MIB;
    out->used = 1024 * MIB * (1 + handle->gpu);
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetMemoryInfo(Handle *handle, Memory *out) {
    ASK(handle->gpu);
    out->total = (handle->part < 0 ? 40 : 10) * 1024 * MIB;
    out->used = 1024 * MIB * (1 + handle->gpu) + 512 * MIB;
    out->free = out->total - out->used;
    return OK;
}

int nvmlDeviceGetUtilizationRates(Handle *handle, Rates *out) {
    ASK_WHOLE(handle);
    *out = (Rates){10 + handle->gpu, 5};
    return parts(handle->gpu) < 0 ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(Handle *handle, unsigned sensor, unsigned *out) { ASK_WHOLE(handle); *out = 40 + handle->gpu + sensor; return OK; }
int nvmlDeviceGetPowerUsage(Handle *handle, unsigned *out) { ASK_WHOLE(handle); *out = 61500; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(Handle *handle, unsigned *out) { ASK_WHOLE(handle); *out = 400000; return OK; }
int nvmlDeviceGetCudaComputeCapability(Handle *handle, int *major, int *minor) { ASK(handle->gpu); *major = 8; *minor = 0; return OK; }

int nvmlDeviceGetMigMode(Handle *handle, unsigned *now, unsigned *next) {
    ASK_WHOLE(handle);
    *now = *next = parts(handle->gpu) >= 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle *handle, unsigned *out) { ASK_WHOLE(handle); *out = MAX_PARTS; return OK; }

/* The parts have the odd numbers, so there are holes. */
int nvmlDeviceGetMigDeviceHandleByIndex(Handle *handle, unsigned index, Handle **out) {
    ASK_WHOLE(handle);
    if (index % 2 == 0 || (int)index / 2 >= parts(handle->gpu)) return NOT_FOUND;
    handles[handle->gpu][1 + index / 2] = (Handle){handle->gpu, index / 2};
    *out = &handles[handle->gpu][1 + index / 2];
    return OK;
}

int nvmlDeviceGetGpuInstanceId(Handle *handle, unsigned *out) { ASK(handle->gpu); *out = 7 + handle->part; return OK; }
int nvmlDeviceGetComputeInstanceId(Handle *handle, unsigned *out) { ASK(handle->gpu); *out = 0; return OK; }

static int give(unsigned *count, Process *out, const Process *all, unsigned num) {
    unsigned room = *count;
    *count = num;
    if (num == 0) return OK;
    if (!out || room < num) return SMALL;
    memcpy(out, all, num * sizeof *all);
    return OK;
}

/* 4242 computes on every GPU (on every part), 4343 computes and draws on GPU 0; the memory of 4343 is not told. */
int nvmlDeviceGetComputeRunningProcesses_v3(Handle *handle, unsigned *count, Process *out) {
    ASK(handle->gpu);
    unsigned instance = handle->part < 0 ? 0xFFFFFFFF : 7u + handle->part, compute = handle->part < 0 ? 0xFFFFFFFF : 0;
    Process all[] = {{4343, ~0ull, instance, compute}, {4242, 300 * MIB, instance, compute}};
    return give(count, out, handle->gpu == 0 ? all : all + 1, handle->gpu == 0 ? 2 : 1);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle *handle, unsigned *count, Process *out) {
    ASK_WHOLE(handle);
    Process all[] = {{4343, ~0ull, 0xFFFFFFFF, 0xFFFFFFFF}};
    return give(count, out, all, handle->gpu == 0);
}

int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    ASK(-1);
    if (pid == 4343) return NOT_FOUND;
    snprintf(out, size, "/opt/tr\xe4" "ger/python [bold]");
    return OK;
}

static int leads_to(const char *what) { const char *told = getenv("STAND_IN_NVLINK"); return told && !strcmp(told, what); }

int nvmlDeviceGetNvLinkState(Handle *handle, unsigned link, unsigned *out) {
    ASK_WHOLE(handle);
    if (!getenv("STAND_IN_NVLINK")) return NOT_SUPPORTED;
    if (link >= NUM_LINKS) return INVALID;
    *out = leads_to("switch") || link < 2;
    return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Handle *handle, unsigned link, unsigned *out) {
    ASK_WHOLE(handle);
    *out = leads_to("switch") ? 2 : 0;
    return link < NUM_LINKS ? OK : INVALID;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *handle, unsigned link, Pci *out) {
    ASK_WHOLE(handle);
    fill_pci(out, handle->gpu ^ 1);
    return link < NUM_LINKS ? OK : INVALID;
}

/* Two GPUs share a switch. */
int nvmlDeviceGetTopologyCommonAncestor(Handle *one, Handle *other, unsigned *out) {
    ASK_WHOLE(one);
    *out = one->gpu / 2 == other->gpu / 2 ? 10 : 50;
    return OK;
}

const char *nvmlErrorString(int code) { return code == 77 ? "N\xe4he" : "an error of the stand-in"; }
