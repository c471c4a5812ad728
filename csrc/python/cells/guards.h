// What a captured call of a cell has found in its modules, to be looked at again at each use.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace autobatch {

class Guards {
 public:
  Guards() = default;
  Guards(const Guards&) = delete;
  Guards& operator=(const Guards&) = delete;
  ~Guards();

  // A list of (dict, name, value): what stands there under that name. Without a name (None): how
  // many items the dict has, so that what is added is noticed. False with an exception set.
  bool add(PyObject* found);
  bool hold();

 private:
  struct Guard {
    PyObject* dict;
    PyObject* name;
    PyObject* value;

    bool holds() const;
  };

  bool are_unchanged() const;
  void note_versions();

  std::vector<PyObject*> held_;
  std::vector<Guard> guards_;
  std::vector<std::pair<PyObject*, uint64_t>> versions_;  // of the guards' dicts, when all held
};

}  // namespace autobatch
