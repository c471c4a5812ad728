// A cache of facts about Python code. The facts about a code object are stored in the code object,
// and are freed together with the code object. So programs that create code at run time (`exec`,
// notebooks) do not leak memory.
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

// A cache with an answer for each code object and key. All members need the GIL. An instance must
// never be destroyed, because code objects refer to its slot. CPython has 255 slots.
template <class Key, class Answer, class Hash = std::hash<Key>>
class CodeCache {
 public:
  // Returns the answer for the code object and the key. At the first call, `make` computes the
  // answer. The reference is valid until the code object is freed. If CPython could not store the
  // answer, the reference is valid only until the next call.
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
    Answer answer = make();  // `make` may run Python code that calls find() again
    return answers.try_emplace(key, std::move(answer)).first->second;
  }

 private:
  using Answers = std::unordered_map<Key, Answer, Hash>;
  static void free(void* extra) { delete static_cast<Answers*>(extra); }

  Py_ssize_t slot_ = request_code_extra(&free);
  Answer last_;  // used if CPython could not store the answers
};

}  // namespace autobatch
