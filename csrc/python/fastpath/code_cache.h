// What was found out about Python code, kept with its code object and freed with it: programs that
// make code (`exec`, notebooks) do not grow by it.
#pragma once

#include <Python.h>

#include <memory>
#include <unordered_map>

namespace autobatch {

#if PY_VERSION_HEX < 0x030C0000
inline int get_code_extra(PyObject* code, Py_ssize_t slot, void** extra) {
  return _PyCode_GetExtra(code, slot, extra);
}
inline int set_code_extra(PyObject* code, Py_ssize_t slot, void* extra) {
  return _PyCode_SetExtra(code, slot, extra);
}
inline Py_ssize_t request_code_extra(freefunc free) { return _PyEval_RequestCodeExtraIndex(free); }
#else
inline int get_code_extra(PyObject* code, Py_ssize_t slot, void** extra) {
  return PyUnstable_Code_GetExtra(code, slot, extra);
}
inline int set_code_extra(PyObject* code, Py_ssize_t slot, void* extra) {
  return PyUnstable_Code_SetExtra(code, slot, extra);
}
inline Py_ssize_t request_code_extra(freefunc free) {
  return PyUnstable_Eval_RequestCodeExtraIndex(free);
}
#endif

// Answers by code object and key. All need the interpreter's lock. One of these lasts as long as
// the process, since code objects refer to its slot: CPython has 255 of them.
template <class Key, class Answer, class Hash = std::hash<Key>>
class CodeCache {
 public:
  // The answer, from `make` the first time. It stays where it is as long as the code.
  template <class Make>
  const Answer& find(PyCodeObject* code, const Key& key, const Make& make) {
    PyObject* object = reinterpret_cast<PyObject*>(code);
    void* extra = nullptr;
    if (get_code_extra(object, slot_, &extra) != 0) PyErr_Clear();
    if (extra == nullptr) {
      auto fresh = std::make_unique<Answers>();
      if (set_code_extra(object, slot_, fresh.get()) != 0) {
        PyErr_Clear();
        return last_ = make();
      }
      extra = fresh.release();
    }
    auto& answers = *static_cast<Answers*>(extra);
    const auto found = answers.find(key);
    if (found != answers.end()) return found->second;
    Answer answer = make();  // which may run Python, and come here
    return answers.try_emplace(key, std::move(answer)).first->second;
  }

 private:
  using Answers = std::unordered_map<Key, Answer, Hash>;
  static void free(void* extra) { delete static_cast<Answers*>(extra); }

  Py_ssize_t slot_ = request_code_extra(&free);
  Answer last_;  // where there is no room for answers
};

}  // namespace autobatch
