// A PJRT plugin that is another one with a single device: TorchTPU takes no process that sees several, and asks for
// options that XLA's plugin for CPUs does not have. Structures: XLA's pjrt_c_api.h.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  size_t struct_size;
  void* extension_start;
  const char* name;
  size_t name_size;
  int type; // 1: int64
  union {
    const char* string;
    int64_t number;
  } value;
  size_t value_size;
} NamedValue;

typedef struct {
  size_t struct_size;
  void* extension_start;
  const NamedValue* options;
  size_t num_options;
} CreateArgs;

typedef void* (*Create)(CreateArgs*);

// Before PJRT_Client_Create in PJRT_Api: its size, extensions and version, and 10 functions.
enum { CLIENT_CREATE = 2 * 8 + 24 + 10 * 8 };

static Create create_below;

static void* create(CreateArgs* args) {
  static const char name[] = "cpu_device_count";
  NamedValue one = {sizeof one, NULL, name, sizeof name - 1, 1, {.number = 1}, 1};
  CreateArgs before = *args;
  args->options = &one;
  args->num_options = 1;
  void* error = create_below(args);
  args->options = before.options;
  args->num_options = before.num_options;
  return error;
}

const void* GetPjrtApi(void) {
  static char* api;
  if (api) return api;
  void* plugin = dlopen(getenv("SHARDKIT_PJRT_CPU"), RTLD_NOW | RTLD_LOCAL);
  if (!plugin) {
    fprintf(stderr, "%s\n", dlerror());
    abort();
  }
  const char* below = ((const char* (*)(void))dlsym(plugin, "GetPjrtApi"))();
  size_t size;
  memcpy(&size, below, sizeof size);
  api = malloc(size);
  memcpy(api, below, size);
  memcpy(&create_below, api + CLIENT_CREATE, sizeof create_below);
  Create mine = create;
  memcpy(api + CLIENT_CREATE, &mine, sizeof mine);
  return api;
}
