// A device of torch's (PrivateUse1) whose memory is the CPU's and whose streams complete late.
//
// What is computed comes after all that its stream has been given before, and the host waits for it. What a library of
// collectives does runs on a stream of its own, late, and the caller's stream waits for it only when it is told to.
// So whoever forgets to wait reads old values. Memory that is taken or given back is filled with NaNs.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/UnaryOps.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <condition_variable>
#include <deque>
#include <thread>

namespace late {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

int devices = 1;               // that this process sees
bool is_bound = false;         // a process can't change its device
bool has_events = true;        // streams can wait for events, and be asked
int late_us = 300;             // how late collectives begin
std::atomic<int64_t> waits{0}; // of the host for a stream
std::atomic<int64_t> bytes{0}; // taken now
thread_local DeviceIndex current = -1;
DeviceIndex first = 0;

DeviceIndex current_device() { return current < 0 ? first : current; }

void set_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < devices, "there is no device ", int(index));
  TORCH_CHECK(!is_bound || index == first, "this process is bound to device ", int(first));
  current = index;
}

// ------------------------------------------------------------ streams
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t pushed = 0, finished = 0;
  std::exception_ptr error;

  Queue() { std::thread([this] { run(); }).detach(); }

  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      std::exception_ptr failed;
      try {
        task();
      } catch (...) {
        failed = std::current_exception();
      }
      task = nullptr;
      std::lock_guard<std::mutex> lock(mutex);
      if (failed && !error) error = failed;
      ++finished;
      changed.notify_all();
    }
  }

  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex);
    tasks.push_back(std::move(task));
    ++pushed;
    changed.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return finished == pushed;
  }

  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    if (finished != pushed) ++waits;
    changed.wait(lock, [this, until = pushed] { return finished >= until; });
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
};

std::mutex all_mutex;
std::map<std::pair<int, int64_t>, Queue*> all; // by device and stream; they last as long as the process
int64_t last_stream = 0;
thread_local std::map<int, int64_t> current_stream;

Queue& queue_of(DeviceIndex device, int64_t id) {
  std::lock_guard<std::mutex> lock(all_mutex);
  auto& found = all[{device, id}];
  if (!found) found = new Queue();
  return *found;
}
Queue& queue_of(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
Queue& here(DeviceIndex device) { return queue_of(device, current_stream[device]); }

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point when;

  void finish() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};
using EventPtr = std::shared_ptr<Event>;

EventPtr record(Queue& queue) {
  auto event = std::make_shared<Event>();
  queue.push([event] { event->finish(); });
  return event;
}
void block(Queue& queue, const EventPtr& event) {
  queue.push([event] { event->wait(); });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device to) const override {
    Device before = getDevice();
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return Device(KIND, current_device()); }
  void setDevice(Device to) const override { set_device(to.index()); }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (!is_bound) current = to.index();
  }
  Stream getStream(Device of) const override {
    auto index = of.has_index() ? of.index() : current_device();
    return Stream(Stream::UNSAFE, Device(KIND, index), current_stream[index]);
  }
  Stream getDefaultStream(Device of) const override { return Stream(Stream::DEFAULT, of); }
  Stream getNewStream(Device of, int) const override {
    std::lock_guard<std::mutex> lock(all_mutex);
    return Stream(Stream::UNSAFE, Device(KIND, of.has_index() ? of.index() : current_device()), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return getNewStream(of, 0); }
  Stream exchangeStream(Stream to) const override {
    Stream before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(devices); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr();
    *static_cast<EventPtr*>(*event) = late::record(queue_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    TORCH_CHECK(has_events, "Asynchronous stream waiting is not yet implemented.");
    if (event) late::block(queue_of(stream), *static_cast<EventPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& found = **static_cast<EventPtr*>(event);
    std::lock_guard<std::mutex> lock(found.mutex);
    return found.done;
  }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<EventPtr*>(event))->wait();
  }
  double elapsedTime(void* one, void* other, const DeviceIndex) const override {
    auto span = (*static_cast<EventPtr*>(other))->when - (*static_cast<EventPtr*>(one))->when;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  bool queryStream(const Stream& stream) const override {
    TORCH_CHECK(has_events, "queryStream not yet implemented.");
    return queue_of(stream).is_idle();
  }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).drain(); }
  void synchronizeDevice(const DeviceIndex index) const override {
    std::vector<Queue*> queues;
    {
      std::lock_guard<std::mutex> lock(all_mutex);
      for (auto& [key, queue] : all)
        if (key.first == index) queues.push_back(queue);
    }
    for (auto* queue : queues) queue->drain();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ------------------------------------------------------------ memory
struct Block {
  void* data;
  size_t size;
  DeviceIndex device;
};
// As a caching allocator does it: after all that the current stream has been given, and after nothing else.
void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes -= int64_t(block->size);
  auto end = [block] {
    memset(block->data, 0xFF, block->size);
    free(block->data);
    delete block;
  };
  auto& queue = here(block->device);
  if (queue.is_idle()) {
    end();
  } else {
    queue.push(end);
  }
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Device on(KIND, current_device());
    if (!size) return {nullptr, on};
    auto* block = new Block{nullptr, size, current_device()};
    TORCH_CHECK(!posix_memalign(&block->data, 64, size), "no memory");
    memset(block->data, 0xFF, size);
    bytes += int64_t(size);
    return {block->data, block, &give_back, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} memory;
REGISTER_ALLOCATOR(KIND, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(devices); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { set_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = current_device();
    set_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current_device()); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    auto kept = std::min(size, storage.nbytes());
    if (kept) {
      here(storage.device().index()).drain();
      memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ------------------------------------------------------------ operations: the CPU's, on the same memory
at::Tensor on_host(const at::Tensor& tensor) {
  auto& from = tensor.storage();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), from.nbytes(),
      c10::DataPtr(from.mutable_data(), Device(c10::DeviceType::CPU)), c10::GetAllocator(c10::DeviceType::CPU), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

at::Tensor on_device(const at::Tensor& tensor, DeviceIndex index) {
  auto flat = tensor.storage();
  auto* kept = new at::Tensor(tensor);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), flat.nbytes(),
      c10::DataPtr(flat.mutable_data(), kept, [](void* t) { delete static_cast<at::Tensor*>(t); }, Device(KIND, index)),
      &memory, true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

struct Translation {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs; // device, host
  DeviceIndex index = -1;

  at::Tensor in(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
    for (auto& [device, host] : pairs)
      if (device.is_same(tensor)) return host;
    if (index < 0) here(index = tensor.device().index()).drain();
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  c10::IValue in(const c10::IValue& value) {
    if (value.isTensor()) return in(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(in(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional<at::Tensor>(in(*each)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == KIND) {
      if (index < 0) index = value.toDevice().has_index() ? value.toDevice().index() : current_device();
      return Device(c10::DeviceType::CPU);
    }
    return value;
  }

  // Results that the CPU gave other memory to.
  void resized() {
    for (auto& [device, host] : pairs) {
      if (host.sizes() != device.sizes()) device.resize_(host.sizes());
      if (host.nbytes() && host.data_ptr() != device.data_ptr()) on_host(device).copy_(host);
    }
  }

  at::Tensor out(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [device, host] : pairs)
      if (host.is_same(tensor)) return device;
    return index < 0 ? tensor : on_device(tensor, index);
  }
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto count = op.schema().arguments().size();
  Translation translation;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) (*stack)[i] = translation.in((*stack)[i]);
  op.callBoxed(stack);
  translation.resized();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = translation.out(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(translation.out(each));
      value = c10::List<at::Tensor>(list);
    }
  }
}

at::Tensor strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, std::optional<Device> device) {
  auto index = device && device->has_index() ? device->index() : current_device();
  auto size = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  auto data = memory.allocate(size);
  data.unsafe_set_device(Device(KIND, index));
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data), &memory, true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  return strided(sizes, strides, c10::dtype_or_default(dtype), device);
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto strides = at::empty(sizes, at::TensorOptions().device(at::kMeta).memory_format(format)).strides().vec();
  return strided(sizes, strides, c10::dtype_or_default(dtype), device);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto needs = size_t(self.storage_offset() + self.numel()) * self.element_size();
  if (needs > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needs);
  return self;
}

// To and from the host as a device does it where it may: late, and the host does not wait.
bool is_flat(const at::Tensor& from, const at::Tensor& to) {
  return from.is_cpu() != to.is_cpu() && from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() &&
      from.sizes() == to.sizes();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (non_blocking && is_flat(from, to)) {
    here((from.is_cpu() ? to : from).device().index()).push([from, to] {
      std::this_thread::sleep_for(std::chrono::microseconds(late_us));
      memcpy(to.data_ptr(), from.data_ptr(), from.nbytes());
    });
    return to;
  }
  Translation translation;
  auto source = translation.in(from);
  translation.in(to).copy_(source);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

// A view, as the CPU's tensors with no values say it.
template <typename F>
at::Tensor view_by(const at::Tensor& self, F view) {
  auto like = at::empty_strided({0}, {1}, at::TensorOptions().dtype(self.dtype()).device(at::kMeta))
                  .as_strided(self.sizes(), self.strides(), self.storage_offset());
  auto seen = view(like);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), seen.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(seen.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides());
  return result;
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  return view_by(self, [&](const at::Tensor& t) { return t.view(sizes); });
}
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return late::as_strided(self, sizes, strides, self.storage_offset());
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_by(self, [&](const at::Tensor& t) { return t.unfold(dim, size, step); });
}
at::Tensor view_as_real(const at::Tensor& self) {
  return view_by(self, [](const at::Tensor& t) { return at::view_as_real(t); });
}
at::Tensor view_as_complex(const at::Tensor& self) {
  return view_by(self, [](const at::Tensor& t) { return at::view_as_complex(t); });
}
at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  auto numel = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {numel}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void record_stream(at::Tensor&, Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

// ------------------------------------------------------------ collectives: another backend's, late
using Tensors = std::vector<at::Tensor>;

struct LateWork final : c10d::Work {
  LateWork(EventPtr event, std::shared_ptr<std::exception_ptr> error, DeviceIndex device)
      : event(std::move(event)), error(std::move(error)), device(device) {}
  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(event->mutex);
    return event->done;
  }
  bool isSuccess() const override { return !*error; }
  void synchronize() override { block(here(device), event); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  EventPtr event;
  std::shared_ptr<std::exception_ptr> error;
  DeviceIndex device;
};

struct LateGroup final : c10d::Backend {
  // only_even: what XLA's collectives can't, this one can't: parts of different sizes, and sums for one rank alone
  LateGroup(c10::intrusive_ptr<c10d::Backend> below, std::string name, bool only_even)
      : Backend(below->getRank(), below->getSize()), below(below), name(std::move(name)), only_even(only_even) {
    std::lock_guard<std::mutex> lock(all_mutex);
    stream = ++last_stream;
  }
  const std::string getBackendName() const override { return name; }

  // Whoever waits for what is in flight gets an error: a receive that is given no time closes gloo's connections.
  void abort() override {
    Tensors nothing{at::empty({1})};
    try {
      below->recv(nothing, (getRank() + 1) % getSize(), 0x5AFE)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
    }
  }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Issues it; tensors are kept until it is through.
  WorkPtr later(Tensors tensors, std::function<void()> task) {
    auto device = tensors.empty() ? current_device() : tensors[0].device().index();
    for (auto& tensor : tensors) TORCH_CHECK(tensor.device().type() == KIND, name, " takes no tensors on ", tensor.device());
    auto& queue = queue_of(device, stream);
    block(queue, record(here(device)));
    auto error = std::make_shared<std::exception_ptr>();
    queue.push([tensors = std::move(tensors), task = std::move(task)] {
      std::this_thread::sleep_for(std::chrono::microseconds(late_us));
      task();
    });
    return c10::make_intrusive<LateWork>(record(queue), error, device);
  }

  static at::Tensor wire(const at::Tensor& tensor) {
    auto host = on_host(tensor);
    return host.scalar_type() == at::kBool ? host.view(at::kByte) : host;
  }
  static Tensors wires(const Tensors& tensors) {
    Tensors result;
    for (auto& each : tensors) result.push_back(wire(each));
    return result;
  }
  void even(const Tensors& parts) const {
    for (auto& part : parts)
      TORCH_CHECK(!only_even || part.numel() == parts[0].numel(), "asymmetric buffer sizes are not supported on TPU");
  }

  void sum(at::Tensor on, c10d::ReduceOp op, int root = -1) {
    bool is_mean = op == c10d::ReduceOp::AVG;
    Tensors tensors{on};
    if (root < 0) {
      c10d::AllreduceOptions options;
      options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
      below->allreduce(tensors, options)->wait();
    } else {
      c10d::ReduceOptions options;
      options.rootRank = root;
      options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
      below->reduce(tensors, options)->wait();
    }
    if (is_mean && (root < 0 || root == getRank())) on.div_(getSize());
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto on = wire(tensors.at(0));
    return later(tensors, [this, on, op = options.reduceOp] { sum(on, op); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (only_even) return Backend::reduce(tensors, options);
    auto on = wire(tensors.at(0));
    return later(tensors, [this, on, op = options.reduceOp, root = options.rootRank] { sum(on, op, int(root)); });
  }
  void send_from(int root, at::Tensor tensor) {
    Tensors tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    if (tensor.numel()) below->broadcast(tensors, options)->wait();
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on = wire(tensors.at(0));
    return later(tensors, [this, on, root = options.rootRank] { send_from(int(root), on); });
  }
  WorkPtr gather(Tensors outputs, const at::Tensor& input) {
    auto kept = outputs;
    kept.push_back(input);
    return later(kept, [this, outputs = wires(outputs), input = wire(input)] {
      outputs[getRank()].copy_(input);
      for (int r = 0; r < getSize(); ++r) send_from(r, outputs[r]);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    even(outputs.at(0));
    return gather(outputs.at(0), inputs.at(0));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return gather(output.view(-1).chunk(getSize()), input.view(-1));
  }
  WorkPtr scatter_sums(const at::Tensor& output, Tensors inputs, c10d::ReduceOp op) {
    auto kept = inputs;
    kept.push_back(output);
    return later(kept, [this, output = wire(output), inputs = wires(inputs), op] {
      for (int r = 0; r < getSize(); ++r) sum(inputs[r], op, r);
      output.copy_(inputs[getRank()]);
    });
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    even(inputs.at(0));
    return scatter_sums(outputs.at(0), inputs.at(0), options.reduceOp);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return scatter_sums(output.view(-1), input.view(-1).chunk(getSize()), options.reduceOp);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& come, std::vector<int64_t>& go,
      const c10d::AllToAllOptions& options) override {
    return later({output, input}, [this, output = wire(output), input = wire(input), come, go, options]() mutable {
      if (only_even) {
        auto same = at::tensor({input.numel(), -input.numel(), output.numel(), -output.numel()}, at::kLong);
        sum(same, c10d::ReduceOp::MAX);
        auto most = same.data_ptr<int64_t>();
        TORCH_CHECK(most[0] == -most[1] && most[2] == -most[3], "asymmetric buffer sizes are not supported on TPU");
      }
      below->alltoall_base(output, input, come, go, options)->wait();
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return later({}, [this, options] { below->barrier(options)->wait(); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return later(tensors, [this, on = wires(tensors), to, tag]() mutable { below->send(on, to, tag)->wait(); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return later(tensors, [this, on = wires(tensors), from, tag]() mutable { below->recv(on, from, tag)->wait(); });
  }

  c10::intrusive_ptr<c10d::Backend> below;
  std::string name;
  bool only_even;
  int64_t stream;
};
} // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new late::Hooks());
  m.def("configure", [](int devices, int first, bool is_bound, bool has_events, int late_us) {
    late::devices = devices;
    late::first = c10::DeviceIndex(first);
    late::is_bound = is_bound;
    late::has_events = has_events;
    late::late_us = late_us;
  });
  m.def("device_count", [] { return late::devices; });
  m.def("current_device", [] { return int(late::current_device()); });
  m.def("set_device", [](int index) { late::set_device(c10::DeviceIndex(index)); });
  m.def("waits", [] { return late::waits.load(); });
  m.def("bytes", [] { return late::bytes.load(); });
  m.def("group", [](c10::intrusive_ptr<c10d::Backend> below, std::string name, bool only_even) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<late::LateGroup>(below, name, only_even));
  });
}
