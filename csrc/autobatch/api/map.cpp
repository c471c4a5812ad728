#include "autobatch/map.h"

#include "autobatch/autobatch.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/fibers/stack_fiber.h"

#include <exception>
#include <limits>
#include <memory>
#include <string>

namespace autobatch {
namespace {

class BodyPool final : public StackFiberPool {
 public:
  BodyPool(Scope& scope, size_t count, const std::function<void(size_t)>& body,
           const MapOptions& options)
      : StackFiberPool(scope, options.max_live),
        count_(count),
        body_(body),
        stack_size_(options.stack_size) {}

  // Returns the exception of the failed body with the lowest index, or null if no body failed.
  const std::exception_ptr& failure() const { return failure_; }

 private:
  std::unique_ptr<Fiber> next() override {
    if (next_ == count_) return nullptr;
    const size_t index = next_++;
    return make_stack_fiber(*this, index, [this, index] { body_(index); }, stack_size_);
  }

  void ended(StackFiber& fiber) override {
    if (!fiber.error || fiber.index() >= failed_) return;
    failed_ = fiber.index();
    failure_ = name(fiber.error, failed_);
    stop_at(failed_);
  }

  static std::exception_ptr name(const std::exception_ptr& error, size_t index) {
    const std::string note = "in instance " + std::to_string(index) + " of autobatch::map";
    try {
      std::rethrow_exception(error);
    } catch (c10::Error& e) {
      e.add_context(note);
    } catch (const std::exception& e) {
      host_annotate(e, note);
    } catch (...) {
    }
    return error;
  }

  size_t count_, next_ = 0;
  const std::function<void(size_t)>& body_;
  size_t stack_size_;
  std::exception_ptr failure_;
  size_t failed_ = std::numeric_limits<size_t>::max();
};

}  // namespace

bool has_map() { return has_stack_fibers(); }

void for_each_instance(size_t count, const std::function<void(size_t)>& body,
                       const MapOptions& options) {
  TORCH_CHECK(has_map(),
              "autobatch::map needs fibers, and this library was built without Boost.Context: "
              "install it (Debian's package is libboost-context-dev) and build again.");
  TORCH_CHECK(options.stack_size >= kLeastStack, "autobatch::map: MapOptions::stack_size is ",
              options.stack_size, " bytes; an instance needs ", kLeastStack, " or more");
  BatchScope opened(options);
  BodyPool pool(*Scope::current(), count, body, options);
  pool.run();
  if (pool.failure()) std::rethrow_exception(pool.failure());
  if (Scope::current()->is_outermost()) opened.flush();  // the destructor of `opened` cannot throw
}

}  // namespace autobatch
