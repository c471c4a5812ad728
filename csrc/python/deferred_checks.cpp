#include "python/deferred_checks.h"

#include "autobatch/capture/capture.h"
#include "python/call_site.h"
#include "python/fastpath/code_cache.h"
#include "python/fibers/fibers.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <frameobject.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace py = pybind11;

namespace autobatch {
namespace {

// --- instructions and frames ---

// The key under which an answer of Python about an instruction is cached.
struct Place {
  int offset;  // offset of the instruction in the code
  int with;    // the other parameter that the answer depends on

  bool operator==(const Place&) const = default;
  struct Hash {
    size_t operator()(const Place& p) const {
      return static_cast<size_t>(p.offset) ^ (static_cast<size_t>(p.with) << 32);
    }
  };
};

// A cache of answers of _deferred_checks.py and _catching.py.
template <class Answer>
using Answers = CodeCache<Place, Answer, Place::Hash>;

constexpr const char* kChecks = "torch_autobatch._deferred_checks";
constexpr const char* kCatching = "torch_autobatch._catching";
py::object ask_python(const char* module, const char* function, const auto&... arguments) {
  return py::module_::import(module).attr(function)(arguments...);
}

py::handle handle(PyCodeObject* code) { return reinterpret_cast<PyObject*>(code); }
py::handle handle(PyFrameObject* frame) { return reinterpret_cast<PyObject*>(frame); }

// Owned references to a frame and its code. Both references may be null.
class Frame {
 public:
  Frame() = default;
  explicit Frame(PyFrameObject* stolen)
      : frame_(stolen), code_(stolen == nullptr ? nullptr : PyFrame_GetCode(stolen)) {}
  Frame(Frame&& other) noexcept
      : frame_(std::exchange(other.frame_, nullptr)), code_(std::exchange(other.code_, nullptr)) {}
  Frame& operator=(Frame&& other) noexcept {
    std::swap(frame_, other.frame_);
    std::swap(code_, other.code_);
    return *this;
  }
  ~Frame() {
    Py_XDECREF(frame_);
    Py_XDECREF(code_);
  }

  explicit operator bool() const { return frame_ != nullptr; }
  PyFrameObject* get() const { return frame_; }
  PyCodeObject* code() const { return code_; }
  int offset() const { return PyFrame_GetLasti(frame_); }
  Frame back() const { return Frame(PyFrame_GetBack(frame_)); }

 private:
  PyFrameObject* frame_ = nullptr;
  PyCodeObject* code_ = nullptr;
};

Frame running_frame() {
  return Frame(reinterpret_cast<PyFrameObject*>(Py_XNewRef(PyEval_GetFrame())));
}

// --- a deferred check ---

// A line of the user's code.
struct Line {
  py::object code;
  int offset = 0;

  std::string text() const {
    if (!code) return {};
    auto* c = reinterpret_cast<PyCodeObject*>(code.ptr());
    return py::str(c->co_filename).cast<std::string>() + ":" +
           std::to_string(PyCode_Addr2Line(c, offset));
  }
};

class PythonCheck final : public Check {
 public:
  PythonCheck(py::object check, py::dict variables, py::object module, Line asked)
      : check_(std::move(check)),
        variables_(std::move(variables)),
        module_(std::move(module)),
        asked_(std::move(asked)) {}
  ~PythonCheck() override {
    const py::gil_scoped_acquire gil;
    error_ = check_ = module_ = asked_.code = py::object();
    variables_.release().dec_ref();
  }

  std::exception_ptr failure() override {
    const py::gil_scoped_acquire gil;
    try {
      if (!error_) error_ = check_.attr("failure")(variables_, module_, asked_.text());
      // PyErr_Restore does not set `__context__`, even if another error is being handled.
      PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(error_.ptr()))),
                    Py_NewRef(error_.ptr()), PyException_GetTraceback(error_.ptr()));
      throw py::error_already_set();
    } catch (...) {
      return std::current_exception();
    }
  }

 private:
  py::object check_;    // a Check of _deferred_checks.py
  py::dict variables_;  // the local variables that the failing branch reads
  py::object module_;   // globals of the function
  Line asked_;          // the line of the user's code that led to the check
  py::object error_;
};

// Returns a local variable of a running function, or null if the variable has no value.
py::object variable(const Frame& frame, py::handle locals, py::handle name) {
#if PY_VERSION_HEX >= 0x030C0000
  (void)locals;
  PyObject* value = PyFrame_GetVar(frame.get(), name.ptr());
#else
  (void)frame;
  PyObject* value = PyObject_GetItem(locals.ptr(), name.ptr());
#endif
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

py::dict variables_of(const Frame& frame, const py::tuple& names) {
  py::dict variables;
  py::object locals;
#if PY_VERSION_HEX < 0x030C0000
  if (!names.empty()) locals = py::reinterpret_steal<py::object>(PyFrame_GetLocals(frame.get()));
#endif
  for (const py::handle name : names) {
    if (const py::object value = variable(frame, locals, name)) variables[name] = value;
  }
  return variables;
}

// --- whether a check may be deferred ---

// The frame that opened the block.
struct Opener {
  Frame frame;
  int offset = 0;  // offset of the instruction that opened the block
};

// Whether a function catches an error. kAsk: the answer depends on the frame's variables, so the
// answer cannot be cached.
enum class Catches : uint8_t { kNo, kYes, kAsk };

// Whether a function may catch an error that is raised at its current instruction. `entered` is the
// offset of the instruction that opened the block, or -1 if the function has not opened the block.
Catches catches(const Frame& frame, int entered) {
  static auto* answers = new Answers<Catches>();
  const Catches known = answers->find(frame.code(), {frame.offset(), entered}, [&] {
    const py::object answer =
        ask_python(kCatching, "catches", handle(frame.code()), frame.offset(), entered);
    return answer.is_none() ? Catches::kAsk : answer.cast<bool>() ? Catches::kYes : Catches::kNo;
  });
  if (known != Catches::kAsk) return known;
  const bool yes =
      ask_python(kCatching, "catches_in", handle(frame.get()), entered).template cast<bool>();
  return yes ? Catches::kYes : Catches::kNo;
}

// Whether an error that is raised at the current instruction of `start` reaches the end of the
// block or of the fiber. Returns false if a function on the call stack may catch the error. Sets
// `asked` to the innermost line of the user's code on the call stack.
bool reaches_end(const Frame& start, const Opener& opener, Line& asked) {
  Frame frame(reinterpret_cast<PyFrameObject*>(Py_NewRef(start.get())));
  while (frame) {
    const bool opened = frame.get() == opener.frame.get();
    if (catches(frame, opened ? opener.offset : -1) == Catches::kYes) return false;
    if (!asked.code && !is_library_code(frame.code())) {
      asked = {py::reinterpret_borrow<py::object>(handle(frame.code())), frame.offset()};
    }
    if (opened) return true;
    frame = frame.back();
  }
  return is_in_fiber();
}

struct Known {
  py::object check;  // null if the value must be read immediately
  py::tuple names;
  bool expected = false, is_of_torch = false;
  bool is_passed_on = false;  // whether the function returns the tested tensor to its caller
};

// How a statement obtains a truth value. kBool and kItem: a method of the tensor returns the value.
// kReturn: a function returns the value. kNotAll and kAny: a function has returned the tensor
// early, because `not all(tensor)` (kNotAll) or `any(tensor)` (kAny) was true.
enum Method : uint8_t { kBool, kItem, kReturn, kNotAll, kAny };
constexpr std::array<const char*, 3> kMethods = {"__bool__", "item", "return"};

py::object ask_of_place(const char* function, const Frame& frame, Method method) {
  const auto module = py::reinterpret_steal<py::object>(PyFrame_GetGlobals(frame.get()));
  return ask_python(kChecks, function, handle(frame.code()), frame.offset(), kMethods[method],
                    module);
}

const Known& known_check(const Frame& frame, Method method) {
  static auto* answers = new Answers<Known>();
  return answers->find(frame.code(), {frame.offset(), method}, [&] {
    Known known;
    known.check = method < kNotAll ? ask_of_place("check_at", frame, method)
                                   : ask_python(kChecks, "check_after", handle(frame.code()),
                                                frame.offset(), static_cast<int>(method));
    if (known.check.is_none() || py::isinstance<py::bool_>(known.check)) {
      known.is_passed_on = known.check.is(py::bool_(true));
      known.check = py::object();
      return known;
    }
    known.names = known.check.attr("names");
    known.expected = known.check.attr("expected").cast<bool>();
    known.is_of_torch = known.check.attr("is_of_torch").cast<bool>();
    return known;
  });
}

// The relation between a tensor's truth value and the truth value that a function returns. Element
// 0 is the tensor's truth value for which the function returns False. Element 1 is the tensor's
// truth value for which the function returns True. An element is empty if the result also depends
// on other values.
using Returned = std::array<std::optional<bool>, 2>;

const Returned& known_return(const Frame& frame, Method method) {
  static auto* answers = new Answers<Returned>();
  return answers->find(frame.code(), {frame.offset(), method},
                       [&] { return ask_of_place("returned_at", frame, method).cast<Returned>(); });
}

// An `if` or `assert` statement whose condition depends on a tensor's truth value.
struct Statement {
  Frame frame;  // frame of the function that contains the statement
  const Known* known = nullptr;
  bool expected = false;  // the tensor's truth value for which the statement does not fail
  bool is_of_torch = false;
};

// A test of a tensor, after which a function returns this tensor early.
struct EarlyReturn {
  Method test = kBool;  // kBool: there is no such test
  bool is_of_torch = false;
};

EarlyReturn known_early_return(const Frame& frame, Method method) {
  static auto* answers = new Answers<EarlyReturn>();
  return answers->find(frame.code(), {frame.offset(), method}, [&]() -> EarlyReturn {
    const py::object answer = ask_of_place("early_return_at", frame, method);
    if (answer.is_none()) return {};
    const auto [test, is_of_torch] = answer.cast<std::pair<int, bool>>();
    return {static_cast<Method>(test), is_of_torch};
  });
}

// Returns the frame that has called `frame` directly. Returns an empty Frame if a function written
// in C is between the two frames.
Frame caller_of(const Frame& frame) {
  Frame caller = frame.back();
  const bool is_direct =
      caller &&
      ask_python(kChecks, "calls", handle(caller.get()), handle(frame.code())).cast<bool>();
  return is_direct ? std::move(caller) : Frame();
}

// Finds the statement that tests the tensor which `frame` returns early.
std::optional<Statement> statement_after(const Frame& frame, EarlyReturn early) {
  Frame caller = caller_of(frame);
  if (!caller) return {};
  const Known& known = known_check(caller, early.test);
  if (known.is_passed_on) return statement_after(caller, early);
  if (!known.check) return {};
  const bool is_of_torch = known.is_of_torch && early.is_of_torch;
  return Statement{std::move(caller), &known, early.test == kNotAll, is_of_torch};
}

// Finds the statement for which `frame` reads the truth value. The statement is in `frame`, or in a
// function to which `frame` returns the truth value or the tested tensor.
std::optional<Statement> statement_of(Frame frame, Method method) {
  const Known& known = known_check(frame, method);
  if (known.check) return Statement{std::move(frame), &known, known.expected, known.is_of_torch};
  const EarlyReturn early = known_early_return(frame, method);
  if (early.test != kBool) return statement_after(frame, early);
  const Returned& returned = known_return(frame, method);
  if (!returned[0] && !returned[1]) return {};
  Frame caller = caller_of(frame);
  if (!caller) return {};
  std::optional<Statement> statement = statement_of(std::move(caller), kReturn);
  if (!statement) return {};
  const std::optional<bool> fails = returned[statement->expected ? 0 : 1];
  if (!fails) return {};
  statement->expected = !*fails;
  return statement;
}

// Records a deferred check, and returns the truth value for which the statement does not fail.
// Returns nothing if the value must be read immediately.
std::optional<bool> answer(PyObject* self, Method method) {
  if (!THPVariable_CheckExact(self) || at::impl::torch_function_mode_enabled()) return {};
  const at::Tensor& tensor = THPVariable_Unpack(self);
  const PendingTensor* pending = as_pending(tensor);
  Scope* scope = pending == nullptr ? nullptr : capturing_scope();
  if (scope == nullptr || scope->checks().which() == DeferredChecks::Which::kNone ||
      pending->graph() != &scope->graph() || pending->numel() != 1 ||
      scope->is_computed(*pending)) {  // then a read starts no flush
    return {};
  }
  const Frame frame = running_frame();
  if (!frame) return {};
  const std::optional<Statement> statement = statement_of(running_frame(), method);
  if (!statement) return {};
  const Known& known = *statement->known;
  if (!statement->is_of_torch && scope->checks().which() != DeferredChecks::Which::kAll) return {};
  const auto* opener = static_cast<const Opener*>(scope->checks().host());
  Line asked;
  if (opener == nullptr || !reaches_end(frame, *opener, asked)) return {};
  const Frame& failing = statement->frame;
  scope->check_later(
      tensor, statement->expected,
      std::make_unique<PythonCheck>(
          known.check, variables_of(failing, known.names),
          py::reinterpret_steal<py::object>(PyFrame_GetGlobals(failing.get())), std::move(asked)));
  return statement->expected;
}

std::array<PyMethodDef*, 2>& methods() {
  static auto* found = [] {
    auto* both = new std::array<PyMethodDef*, 2>();
    const py::object base = py::module_::import("torch._C").attr("TensorBase");
    for (size_t i = 0; i < both->size(); ++i) {
      const py::object method =
          py::reinterpret_borrow<py::dict>(base.attr("__dict__"))[kMethods[i]];
      PyMethodDef* def = reinterpret_cast<PyMethodDescrObject*>(method.ptr())->d_method;
      if (def->ml_flags == METH_NOARGS) (*both)[i] = def;
    }
    return both;
  }();
  return *found;
}

std::array<PyCFunction, 2> originals{};

template <Method kMethod>
PyObject* ask(PyObject* self, PyObject* nothing) {
  HANDLE_TH_ERRORS
  if (const std::optional<bool> known = answer(self, kMethod)) return PyBool_FromLong(*known);
  END_HANDLE_TH_ERRORS
  return originals[kMethod](self, nothing);
}

}  // namespace

void install_checks() {
  const std::array<PyCFunction, 2> ours = {ask<kBool>, ask<kItem>};
  for (size_t i = 0; i < ours.size(); ++i) {
    PyMethodDef* method = methods()[i];
    if (method == nullptr) continue;
    originals[i] = method->ml_meth;
    method->ml_meth = ours[i];
  }
}

void remove_checks() {
  for (size_t i = 0; i < originals.size(); ++i) {
    if (methods()[i] != nullptr) methods()[i]->ml_meth = originals[i];
  }
}

void begin_checks(Scope& scope, DeferredChecks::Which which) {
  const Frame enter = running_frame();
  auto opener = std::make_unique<Opener>();
  if (enter) opener->frame = enter.back();
  if (opener->frame) opener->offset = opener->frame.offset();
  const auto drop = [](void* held) {
    const py::gil_scoped_acquire gil;
    delete static_cast<Opener*>(held);
  };
  scope.checks().begin(which, std::shared_ptr<void>(opener.release(), drop));
}

bool may_catch() {
  Scope* scope = Scope::current();
  const auto* opener =
      scope == nullptr ? nullptr : static_cast<const Opener*>(scope->checks().host());
  const py::gil_scoped_acquire gil;
  const Frame frame = running_frame();
  Line asked;
  return frame && opener != nullptr && !reaches_end(frame, *opener, asked);
}

}  // namespace autobatch
