/* Stands for libcuda.so.1 in tests: does what the driver would do as far as one host thread can see, and counts.
 *
 * "Machine code" is "library:number", a library made by cuda_on_cpu.py and the kernel's number in it: functions are its
 * emulate_NUMBER_SYMBOL and run at once, on the CPU. The number "-" makes functions that do nothing.
 *
 * Streams that are made here are threads, each of which does what it was given in that order, after a while (`delay`). Work
 * on any other stream is done at once, and waits on the thread that gives it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*emulated)(int blocks, int threads, void** arguments);

struct context { int device; };
struct module { char library[4096]; char number[16]; };
enum { STATIC_SHARED_BYTES = 128 };  // that every kernel has: with its dynamic ones 48 KiB, if it does not ask for more
struct function { char symbol[256]; emulated run; int shared_bytes; };
/* What a test may read and set; see the Python class beside it. */
struct fake_state {
  int devices, multiprocessors, capability, capturing, failing;
  int loads, launches, early, copies, pushes, pops;
  unsigned last_blocks, last_threads, last_shared_bytes;
  char last_symbol[256];
  int delay; /* the most microseconds that a stream takes to begin something */
};
struct fake_state fake = {.devices = 2, .multiprocessors = 3, .capability = 9};
static pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER; /* the emulation has one set of blocks and threads */

static struct context contexts[16];
static _Thread_local struct context* stack[16];
static _Thread_local int depth = 0;

int fake_depth(void) { return depth; }
int fake_current(void) { return depth ? stack[depth - 1]->device : -1; }

int cuInit(unsigned flags) { return fake.failing == 100 ? 100 : flags ? 1 : 0; }
int cuGetErrorName(int error, const char** text) {
  *text = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_FAKE";
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : error == 700 ? "an illegal memory access was encountered" : "a fake error";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { return ordinal < fake.devices ? (*device = ordinal, 0) : 101; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  if (attribute != 16 && attribute != 75) return 1;
  *value = attribute == 75 ? fake.capability : fake.multiprocessors; /* the compute capability's major number, or the size */
  return 0;
}
int cuDevicePrimaryCtxRetain(struct context** context, int device) {
  contexts[device].device = device;
  *context = &contexts[device];
  return 0;
}
int cuCtxGetCurrent(struct context** context) {
  *context = depth ? stack[depth - 1] : NULL;
  return 0;
}
int cuCtxPushCurrent_v2(struct context* context) {
  __atomic_add_fetch(&fake.pushes, 1, __ATOMIC_RELAXED);
  stack[depth++] = context;
  return 0;
}
int cuCtxPopCurrent_v2(struct context** context) {
  __atomic_add_fetch(&fake.pops, 1, __ATOMIC_RELAXED);
  *context = stack[--depth];
  return 0;
}
int cuModuleLoadData(struct module** module, const void* image) {
  if (!depth) return 201;
  if (fake.capturing) return 900;
  struct module* made = calloc(1, sizeof(struct module));
  if (sscanf(image, "%4095[^:]:%15s", made->library, made->number) != 2) return 200;
  __atomic_add_fetch(&fake.loads, 1, __ATOMIC_RELAXED);
  *module = made;
  return 0;
}
int cuModuleGetFunction(struct function** function, struct module* module, const char* name) {
  struct function* made = calloc(1, sizeof(struct function));
  snprintf(made->symbol, sizeof(made->symbol), "%s", name);
  if (strcmp(module->number, "-") != 0) {
    char symbol[512];
    void* library = dlopen(module->library, RTLD_NOW | RTLD_LOCAL);
    snprintf(symbol, sizeof(symbol), "emulate_%s_%s", module->number, name);
    made->run = library ? (emulated)dlsym(library, symbol) : NULL;
    if (!made->run) return 500;
  } else if (strncmp(name, "missing", 7) == 0) {
    return 500;
  }
  *function = made;
  return 0;
}
int cuFuncSetAttribute(struct function* function, int attribute, int value) {
  if (attribute != 8 || value > 227 * 1024) return 1;
  function->shared_bytes = value;
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  if (!depth) return 201; /* as the driver, which asks the current context */
  *status = fake.capturing;
  return 0;
}

/* ---- streams and events ---- */

struct event { long recorded, done; };
struct memory_operation { unsigned operation; unsigned long long address; uint64_t value; unsigned flags; uint64_t rest[2]; };
struct work {
  enum { COPY, FLAG, RECORD, FOLLOW } kind;
  unsigned long long to, from;
  size_t bytes;
  struct memory_operation flag;
  struct event* event;
  long number;
  struct work* next;
};
struct stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t given;
  struct work *first, *last;
  int works; /* whether the thread does something */
  struct stream* next;
};
static struct stream* streams; /* those that were made here */
static int busy;               /* threads that do work of other streams now: to who asks, the device */

static void do_work(const struct work* w) {
  switch (w->kind) {
    case COPY: memcpy((void*)w->to, (const void*)w->from, w->bytes); return;
    case RECORD: __atomic_store_n(&w->event->done, w->number, __ATOMIC_SEQ_CST); return;
    case FOLLOW: while (__atomic_load_n(&w->event->done, __ATOMIC_SEQ_CST) < w->number) sched_yield(); return;
    case FLAG: break;
  }
  uint32_t* flag = (uint32_t*)w->flag.address;
  const uint32_t value = (uint32_t)w->flag.value;
  if (w->flag.operation == 2) __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
  else while (__atomic_load_n(flag, __ATOMIC_SEQ_CST) != value) sched_yield();
}
static void* serve(void* given) {
  struct stream* s = given;
  unsigned seed = (unsigned)(uintptr_t)s ^ (unsigned)getpid();
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first) pthread_cond_wait(&s->given, &s->lock);
    struct work* w = s->first;
    if (!(s->first = w->next)) s->last = NULL;
    s->works = 1;
    pthread_mutex_unlock(&s->lock);
    if (fake.delay > 0) usleep((unsigned)rand_r(&seed) % (unsigned)fake.delay);
    do_work(w);
    free(w);
    pthread_mutex_lock(&s->lock);
    s->works = 0;
    pthread_mutex_unlock(&s->lock);
  }
  return NULL;
}
/* Wait until all streams have done what they were given. */
void fake_drain(void) {
  for (struct stream* s = streams; s; s = s->next) {
    for (int idle = 0; !idle;) {
      pthread_mutex_lock(&s->lock);
      idle = !s->first && !s->works;
      pthread_mutex_unlock(&s->lock);
      if (!idle) sched_yield();
    }
  }
}
static int give(void* stream, struct work w) {
  struct stream* s = streams;
  while (s && s != stream) s = s->next;
  if (!s) {
    __atomic_add_fetch(&busy, 1, __ATOMIC_SEQ_CST);
    do_work(&w);
    __atomic_sub_fetch(&busy, 1, __ATOMIC_SEQ_CST);
    return 0;
  }
  struct work* given = malloc(sizeof w);
  *given = w;
  given->next = NULL;
  pthread_mutex_lock(&s->lock);
  if (s->last) s->last->next = given;
  else s->first = given;
  s->last = given;
  pthread_cond_signal(&s->given);
  pthread_mutex_unlock(&s->lock);
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static _Thread_local int now = 0;
  const int before = now;
  return now = *mode, *mode = before, 0;
}
int cuStreamCreateWithPriority(struct stream** stream, unsigned flags, int priority) {
  if (!depth || flags != 1 || priority > 0) return 1;
  struct stream* s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->given, NULL);
  s->next = streams;
  streams = s;
  *stream = s;
  return pthread_create(&s->thread, NULL, serve, s) ? 2 : 0;
}
int cuEventCreate(struct event** event, unsigned flags) { return *event = calloc(1, sizeof **event), flags == 2 ? 0 : 1; }
int cuEventRecord(struct event* event, void* stream) {
  return give(stream, (struct work){.kind = RECORD, .event = event, .number = ++event->recorded});
}
int cuStreamWaitEvent(void* stream, struct event* event, unsigned flags) {
  return flags ? 1 : give(stream, (struct work){.kind = FOLLOW, .event = event, .number = event->recorded});
}
int cuEventQuery(struct event* event) {
  return busy || __atomic_load_n(&event->done, __ATOMIC_SEQ_CST) < event->recorded ? 600 : 0;
}
int cuStreamBatchMemOp_v2(void* stream, unsigned count, const struct memory_operation* operations, unsigned flags) {
  if (flags || !depth || !count || count > 256) return 1;
  for (unsigned i = 0; i < count; ++i) {
    const struct memory_operation* o = operations + i;
    if (o->address % 4 || (o->operation == 1 ? o->flags != 1 : o->operation != 2 || o->flags)) return 1;
    give(stream, (struct work){.kind = FLAG, .flag = *o});
  }
  return 0;
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  __atomic_add_fetch(&fake.copies, 1, __ATOMIC_RELAXED);
  return give(stream, (struct work){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}
struct attribute { unsigned id; union { char bytes[64]; long long alignment; int number; } value; };
struct configuration {
  unsigned x, y, z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  const struct attribute* attributes;
  unsigned attribute_count;
};
int cuLaunchKernelEx(const struct configuration* c, struct function* f, void** parameters, void** extra) {
  if (fake.failing) return fake.failing;
  if (!depth || c->y != 1 || c->z != 1 || c->block_y != 1 || c->block_z != 1 || extra) return 1;
  if (c->shared_bytes > 48 * 1024 - STATIC_SHARED_BYTES && (int)c->shared_bytes > f->shared_bytes) return 1;
  if (c->attribute_count > 1) return 1;
  const int early = c->attribute_count && c->attributes->id == 6 && c->attributes->value.number == 1;
  if (c->attribute_count && !early) return 1;
  pthread_mutex_lock(&one_launch);
  ++fake.launches;
  fake.early += early;
  strcpy(fake.last_symbol, f->symbol);
  fake.last_blocks = c->x, fake.last_threads = c->block_x, fake.last_shared_bytes = c->shared_bytes;
  if (f->run) f->run((int)c->x, (int)c->block_x, parameters);
  pthread_mutex_unlock(&one_launch);
  return 0;
}
