// A process group for a device whose own has no wires here: tensors travel through the host, over gloo.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace {
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Done final : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds) override { return true; }
};

struct HostGroup final : c10d::Backend {
  HostGroup(c10::intrusive_ptr<c10d::Backend> below, std::string name)
      : Backend(below->getRank(), below->getSize()), below(below), name(std::move(name)) {}
  const std::string getBackendName() const override { return name; }

  static at::Tensor host(const at::Tensor& tensor) {
    auto here = tensor.detach().to(at::kCPU).contiguous();
    return here.scalar_type() == at::kBool ? here.view(at::kByte) : here;
  }
  static void back(const at::Tensor& to, const at::Tensor& from) {
    auto value = to.scalar_type() == at::kBool ? from.view(at::kBool) : from;
    to.detach().copy_(value.view(to.sizes()));
  }
  static WorkPtr done() { return c10::make_intrusive<Done>(); }

  void sum(at::Tensor on, c10d::ReduceOp op) {
    bool is_mean = op == c10d::ReduceOp::AVG;
    Tensors tensors{on};
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    below->allreduce(tensors, options)->wait();
    if (is_mean) on.div_(getSize());
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto on = host(tensors.at(0));
    sum(on, options.reduceOp);
    back(tensors.at(0), on);
    return done();
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors on{host(tensors.at(0))};
    if (on[0].numel()) below->broadcast(on, options)->wait();
    back(tensors.at(0), on[0]);
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    auto own = host(input).view(-1);
    std::vector<Tensors> parts(1);
    for (int r = 0; r < getSize(); ++r) parts[0].push_back(at::empty_like(own));
    Tensors inputs{own};
    below->allgather(parts, inputs, {})->wait();
    back(output, at::cat(parts[0]));
    return done();
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto whole = at::empty({getSize() * inputs.at(0).numel()}, inputs.at(0).options());
    auto work = _allgather_base(whole, inputs.at(0), options);
    auto parts = whole.chunk(getSize());
    for (int r = 0; r < getSize(); ++r) outputs.at(0)[r].copy_(parts[r].view(outputs[0][r].sizes()));
    return work;
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto on = host(input).view(-1);
    sum(on, options.reduceOp);
    back(output, on.chunk(getSize())[getRank()]);
    return done();
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& come, std::vector<int64_t>& go,
      const c10d::AllToAllOptions& options) override {
    auto to = host(output), from = host(input);
    auto same = at::tensor({from.numel(), -from.numel(), to.numel(), -to.numel()}, at::kLong);
    sum(same, c10d::ReduceOp::MAX);
    auto most = same.data_ptr<int64_t>();
    TORCH_CHECK(most[0] == -most[1] && most[2] == -most[3], "asymmetric buffer sizes are not supported on TPU");
    below->alltoall_base(to, from, come, go, options)->wait();
    back(output, to);
    return done();
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    below->barrier(options)->wait();
    return done();
  }
  c10::intrusive_ptr<c10d::Backend> below;
  std::string name;
};
} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("group", [](c10::intrusive_ptr<c10d::Backend> below, std::string name) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<HostGroup>(below, name));
  });
}
