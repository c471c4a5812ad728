// What a captured call of a cell has found in its modules, to be looked at again at each use.
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

  // A list of (dict, name, value): what stands there under that name. Without a name (None): how
  // many items the dict has, so that what is added is noticed. False with an exception set.
  bool add(PyObject* found);
  // A list of tensors whose sizes, type and `requires_grad` are to stay.
  void add_tensors(PyObject* tensors);
  bool hold();

 private:
  struct Item {
    PyObject* name;
    PyObject* value;
  };
  struct Table {
    PyObject* dict;
    std::vector<Item> items;
    uint64_t version = 0;  // when all of its items held; 0: not known

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

  std::vector<PyObject*> held_;
  std::vector<Kind> kinds_;
  std::vector<Table> tables_;
  std::unordered_map<PyObject*, size_t> numbers_;  // of tables, by dict
};

}  // namespace autobatch
