// The state of modules and tensors on which a traced call of a cell depends. Before each use of the
// trace, the current state is compared with the stored state.
#pragma once

#include <ATen/core/Tensor.h>

#include <Python.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace autobatch {

class Guards {
 public:
  Guards() = default;
  Guards(const Guards&) = delete;
  Guards& operator=(const Guards&) = delete;
  ~Guards();

  // Adds a list of tuples (dict, name, value). The dict of a tuple must contain the tuple's value
  // under the tuple's name. If the name is None, the value is the number of items in the dict, so
  // that added items are detected. If there is an error, returns false with an exception set.
  bool add(PyObject* found);
  // Adds a list of tensors whose sizes, dtype and `requires_grad` must not change.
  void add_tensors(PyObject* tensors);
  // Whether the current state equals the stored state.
  bool hold();

 private:
  struct Item {
    PyObject* name;
    PyObject* value;
  };
  struct Table {
    PyObject* dict;
    std::vector<Item> items;
    // The version that the dict had when holds() last returned true. 0: unknown.
    uint64_t version = 0;

    bool holds();
  };

  struct Kind {
    at::Tensor tensor;
    std::vector<int64_t> sizes;
    c10::ScalarType dtype;
    bool requires_grad;

    bool holds() const {
      return tensor.sizes() == sizes && tensor.scalar_type() == dtype &&
             tensor.requires_grad() == requires_grad;
    }
  };

  std::vector<PyObject*> held_;  // the tuples; owned
  std::vector<Kind> kinds_;
  std::vector<Table> tables_;
  std::unordered_map<PyObject*, size_t> numbers_;  // for each dict: index in tables_
};

}  // namespace autobatch
