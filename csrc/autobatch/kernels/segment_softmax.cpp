// Distributes the segments of a softmax among threads.
#include "autobatch/kernels/segment_softmax.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"
#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;

const char* bytes(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }

void run(const Tensor* gradient, const Tensor& x, const Counts& counts, bool log, Tensor& out) {
  const auto segments = static_cast<int64_t>(counts.size());
  std::vector<int64_t> starts(counts.size() + 1, 0);
  for (size_t s = 0; s < counts.size(); ++s) starts[s + 1] = starts[s] + counts[s];
  const auto item = static_cast<int64_t>(x.element_size());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t grain =
      std::max<int64_t>(1, segments * kGrainElements / std::max<int64_t>(1, starts.back()));
  at::parallel_for(0, segments, grain, [&](int64_t begin, int64_t end) {
    const int64_t first = starts[static_cast<size_t>(begin)] * item;
    const c10::ArrayRef<int64_t> part(counts.data() + begin, static_cast<size_t>(end - begin));
    cpu_kernels()->softmax({gradient == nullptr ? nullptr : bytes(*gradient) + first,
                            bytes(x) + first, to + first, part, log},
                           x.scalar_type());
  });
}

}  // namespace

bool has_softmax_kernel(const Tensor& like) {
  return has_host_memory(like.device()) && has_cpu_kernels(like.scalar_type());
}

void segment_softmax(const Tensor& x, const Counts& counts, bool log, Tensor& out) {
  run(nullptr, x, counts, log, out);
}

Tensor segment_softmax_gradient(const Tensor& g, const Tensor& y, const Counts& counts, bool log) {
  Tensor out = pooled_empty(y.sizes(), y.options());
  run(&g, y, counts, log, out);
  return out;
}

}  // namespace autobatch
