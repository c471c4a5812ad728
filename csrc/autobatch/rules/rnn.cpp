// The rules of nn.LSTM, nn.GRU and nn.RNN. The calls of all instances run together, for sequences
// of any lengths.
#include "autobatch/rules/rnn.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <vector>

namespace autobatch {
namespace {

using at::Tensor;

// The form of the layers. The signature determines the form. The ops are
//   op(input, hx, params[], has_biases, num_layers, dropout, train, bidirectional, batch_first)
// -> (output, hy[, cy]). A run is one layer in one direction. The operands are the input, the
// state(s), and then the weights of each run.
struct Form {
  Cell cell = Cell::kLstm;
  bool biases = false;
  bool projected = false;
  bool batch_first = false;
  int64_t layers = 0;
  int64_t directions = 1;
  double dropout = 0;  // probability, between layers

  Form(Cell of, at::ArrayRef<c10::IValue> arguments)
      : cell(of),
        biases(arguments[3].toBool()),
        batch_first(arguments[8].toBool()),
        layers(arguments[4].toInt()),
        directions(arguments[7].toBool() ? 2 : 1) {
    if (arguments[6].toBool() && layers > 1) dropout = arguments[5].toDouble();
  }

  size_t num_states() const { return cell == Cell::kLstm ? 2 : 1; }
  int64_t runs() const { return layers * directions; }
  size_t params_per_run() const { return (biases ? 4 : 2) + (projected ? 1 : 0); }
  size_t first_param(int64_t run) const {
    return 1 + num_states() + static_cast<size_t>(run) * params_per_run();
  }
  size_t hidden_weight(int64_t run) const { return first_param(run) + 1; }
  size_t projection(int64_t run) const { return first_param(run) + params_per_run() - 1; }
};

// The form of the layers of a batch, and the widths of the tensors.
struct Shape : Form {
  int64_t input = 0, hidden = 0, output = 0;  // widths of an input row, of c and of h

  Shape(Cell of, const BatchView& batch) : Form(of, batch.signature().arguments) {
    const size_t params = batch.num_operands() - 1 - num_states();
    projected = params != static_cast<size_t>(runs()) * params_per_run();
    input = width(batch, 0);
    output = width(batch, 1);
    hidden = num_states() == 2 ? width(batch, 2) : output;
  }

  int64_t row() const { return directions * output; }
  Tensor columns(const Tensor& rows, int64_t direction) const {
    return rows.narrow(1, direction * output, output);
  }

 private:
  static int64_t width(const BatchView& batch, size_t slot) {
    return batch.operand_value(0, slot).geometry->sizes.back();
  }
};

Tensor index_tensor(const std::vector<int64_t>& index, const Tensor& like) {
  return to_device(at::tensor(index, at::kLong), like.device());
}

Tensor inverse_of(const Tensor& permutation) {
  Tensor out = at::empty_like(permutation);
  out.index_copy_(0, permutation, at::arange(permutation.numel(), permutation.options()));
  return out;
}

// The values that a batch keeps for backward: the input of each layer, and the trace of each run.
struct KeptRun {
  KeptRun(const BatchView& batch, const Form& form) : sequences(batch, form.batch_first) {}

  Sequences sequences;
  std::vector<Tensor> inputs;
  std::vector<Trace> traces;
};

Direction direction_of(BatchView& batch, const Shape& shape, int64_t run) {
  Direction d;
  size_t slot = shape.first_param(run);
  d.cell = shape.cell;
  d.reverse = run % shape.directions == 1;
  d.w_ih = batch.single(slot++);
  d.w_hh = batch.single(slot++);
  if (shape.biases) d.b_ih = batch.single(slot++), d.b_hh = batch.single(slot++);
  if (shape.projected) d.w_hr = batch.single(slot);
  return d;
}

// --- capture ---

bool is_matrix(const Value& v, int64_t rows, int64_t columns) {
  return v.geometry->dim() == 2 && v.geometry->sizes[0] == rows && v.geometry->sizes[1] == columns;
}

// Adds the weights of all runs to `builder`, as operands of the node. Returns false if eager does
// not accept their sizes. Sets `requires_grad` if any weight other than a projection requires grad.
bool capture_params(NodeBuilder& builder, Form& form, int64_t input, int64_t hidden, int64_t output,
                    at::ScalarType dtype, bool& requires_grad) {
  const auto params = builder.argument(2).toListRef();
  const auto runs = static_cast<size_t>(form.runs());
  form.projected = output != hidden;
  if (form.projected && form.cell != Cell::kLstm) return false;
  if (params.size() != runs * form.params_per_run()) return false;
  const int64_t gates = gates_of(form.cell) * hidden;
  for (size_t e = 0; e < params.size(); ++e) {
    const Tensor& tensor = params[e].toTensor();
    if (!tensor.defined() || builder.is_computed(tensor)) return false;
    const Value w = builder.weight(2, e);
    const size_t role = e % form.params_per_run();
    const bool first_layer = e < static_cast<size_t>(form.directions) * form.params_per_run();
    const bool projects = form.projected && role + 1 == form.params_per_run();
    if (w.dtype != dtype) return false;
    if (projects) {
      if (!is_matrix(w, output, hidden)) return false;
      continue;
    }
    requires_grad = requires_grad || w.requires_grad;
    if (role == 0 && !is_matrix(w, gates, first_layer ? input : output * form.directions)) {
      return false;
    }
    if (role == 1 && !is_matrix(w, gates, output)) return false;
    if (role > 1 && (w.geometry->dim() != 1 || w.geometry->sizes[0] != gates)) return false;
  }
  return true;
}

class RecurrentLayerRule final : public Rule {
 public:
  explicit RecurrentLayerRule(Cell cell) : cell_(cell) {}

  bool heavy() const override { return true; }

  bool capture(NodeBuilder& builder) const override {
    Form form(cell_, builder.arguments());
    if (form.layers < 1 || form.dropout < 0 || form.dropout > 1) return false;
    for (size_t i = 3; i < 9; ++i) builder.constant(i);
    const Value x = builder.operand(0);
    if (!has_recurrence_kernel(x.device, x.dtype)) return false;
    // Eager raises an error for an empty input.
    if (x.geometry->dim() != 3 || x.geometry->numel == 0) return false;
    const int64_t length = x.geometry->sizes[form.batch_first ? 1 : 0];
    const int64_t width = x.geometry->sizes[form.batch_first ? 0 : 1];
    at::DimVector states;  // by state: its width
    if (cell_ == Cell::kLstm) {
      if (builder.argument(1).toListRef().size() != 2) return false;
      if (!capture_state(builder, builder.operand(1, 0), form, width, x.dtype, states))
        return false;
      if (!capture_state(builder, builder.operand(1, 1), form, width, x.dtype, states))
        return false;
    } else {
      if (!capture_state(builder, builder.operand(1), form, width, x.dtype, states)) return false;
    }
    bool requires_grad = builder.any_requires_grad();
    if (!capture_params(builder, form, x.geometry->sizes[2], states.back(), states[0], x.dtype,
                        requires_grad)) {
      return false;
    }
    // If only projections require grad, some of eager's results do not require grad.
    if (builder.any_requires_grad() && !requires_grad) return false;
    builder.key(dtype_word(x));
    const int64_t row = form.directions * states[0];
    builder.result(output_geometry(builder, form, length, width, row), x.dtype);
    for (int64_t state : states) builder.result({form.runs(), width, state}, x.dtype);
    for (int64_t l = 1; l < form.layers && form.dropout > 0; ++l) {
      builder.hidden({length, width, row}, x.dtype);
    }
    return true;
  }

  void forward(Batch& batch) const override {
    const Shape shape(cell_, batch);
    auto kept = std::make_shared<KeptRun>(batch, shape);
    const Packing& packing = kept->sequences.packing();
    const Tensor input = batch.rows(0, shape.input);
    const Tensor in_memory = index_tensor(kept->sequences.rows(false), input);
    const Tensor in_order =
        shape.batch_first ? index_tensor(kept->sequences.rows(true), input) : in_memory;
    Tensor x = input.index_select(0, in_order);
    for (int64_t layer = 0; layer < shape.layers; ++layer) {
      if (layer > 0 && shape.dropout > 0) {
        x = drop(batch, shape, layer).index_select(0, in_memory).mul_(x);
      }
      const Tensor y = at::empty({packing.rows(), shape.row()}, x.options());
      for (int64_t side = 0; side < shape.directions; ++side) {
        const int64_t run = layer * shape.directions + side;
        Trace trace;
        forward_run(batch, shape, kept->sequences, run, x, shape.columns(y, side),
                    batch.needs_grad() ? &trace : nullptr);
        if (batch.needs_grad()) kept->traces.push_back(std::move(trace));
      }
      if (batch.needs_grad()) kept->inputs.push_back(x);
      x = y;
    }
    Tensor out = batch.output_rows(0, shape.row());
    at::index_select_out(out, x, 0, inverse_of(in_memory));
    if (batch.needs_grad()) batch.record().kept = kept;
  }

  void backward(BackwardBatch& batch) const override {
    const Shape shape(cell_, batch);
    const auto& all = *static_cast<const KeptRun*>(batch.record().kept.get());
    const KeptRun* kept = &all;
    std::optional<KeptRun> reached;
    if (!batch.complete()) kept = &reached.emplace(rows_reached(batch, shape, all));
    const Tensor g_out = batch.grad_rows(0, shape.row());
    const Tensor in_order = index_tensor(kept->sequences.rows(shape.batch_first), g_out);
    Tensor g = g_out.index_select(0, in_order);
    StateGradients states(batch, shape);
    for (int64_t layer = shape.layers - 1; layer >= 0; --layer) {
      const bool wanted = needs_below(batch, shape, layer);
      Tensor g_input;
      for (int64_t side = 0; side < shape.directions; ++side) {
        const int64_t run = layer * shape.directions + side;
        backward_run(batch, shape, *kept, run, shape.columns(g, side), states,
                     wanted ? &g_input : nullptr);
      }
      if (layer > 0 && shape.dropout > 0 && wanted) {
        const Tensor masks = batch.result_rows(mask_of(shape, layer), shape.row());
        g_input.mul_(masks.index_select(0, index_tensor(kept->sequences.rows(false), g_out)));
      }
      g = g_input;
      if (!g.defined()) break;
    }
    if (batch.needs(0)) batch.add(0, g.index_select(0, inverse_of(in_order)));
    states.add_to(batch);
  }

  // With dropout, runs the layers one by one, and applies the masks that forward drew.
  std::vector<Tensor> replay(const Signature& signature, at::ArrayRef<Tensor> operands,
                             at::ArrayRef<Tensor> computed) const override {
    Form form(cell_, signature.arguments);
    if (form.dropout == 0) return eager(signature, operands, computed);
    form.projected = operands.size() != form.first_param(form.runs());
    Tensor x = operands[0];
    std::vector<std::vector<Tensor>> states(form.num_states());
    for (int64_t layer = 0; layer < form.layers; ++layer) {
      if (layer > 0) {
        const Tensor& mask = computed[mask_of(form, layer)];
        x = x * (form.batch_first ? mask.transpose(0, 1) : mask);
      }
      const std::vector<Tensor> results = replay_layer(signature, form, operands, layer, x);
      x = results[0];
      for (size_t k = 0; k < states.size(); ++k) states[k].push_back(results[k + 1]);
    }
    std::vector<Tensor> out{x};
    for (const auto& of_layers : states) out.push_back(at::cat(of_layers, 0));
    return out;
  }

 private:
  static bool capture_state(const NodeBuilder& builder, const Value& state, const Form& form,
                            int64_t width, at::ScalarType dtype, at::DimVector& states) {
    const auto& sizes = state.geometry->sizes;
    if (!has_host_memory(state.device) || state.dtype != dtype || sizes.size() != 3) return false;
    if (sizes[0] != form.runs() || sizes[1] != width || sizes[2] < 1) return false;
    states.push_back(sizes[2]);
    return builder.deferrable();
  }

  // The layout in memory is [T, B, row], as in eager.
  static const Geometry* output_geometry(NodeBuilder& builder, const Form& form, int64_t length,
                                         int64_t width, int64_t row) {
    auto& geometries = builder.graph().geometries();
    if (!form.batch_first) return geometries.intern_contiguous({length, width, row});
    return geometries.intern({width, length, row}, {row, width * row, 1});
  }

  // Returns the index of the hidden result that contains the dropout mask for the input of `layer`.
  static size_t mask_of(const Form& form, int64_t layer) {
    return form.num_states() + static_cast<size_t>(layer);
  }

  static Tensor drop(Batch& batch, const Shape& shape, int64_t layer) {
    Tensor mask = batch.output_rows(mask_of(shape, layer), shape.row());
    const double keep = 1 - shape.dropout;
    return keep > 0 ? mask.bernoulli_(keep).div_(keep) : mask.zero_();
  }

  static void forward_run(Batch& batch, const Shape& shape, const Sequences& sequences, int64_t run,
                          const Tensor& x, const Tensor& y, Trace* trace) {
    const Tensor at_places = index_tensor(sequences.states(run, shape.runs()), x);
    const Tensor h = batch.rows(1, shape.output).index_select(0, at_places);
    Tensor c;
    if (shape.num_states() == 2) c = batch.rows(2, shape.hidden).index_select(0, at_places);
    run_recurrence(sequences.packing(), direction_of(batch, shape, run), x, y, h, c, trace);
    batch.output_rows(1, shape.output).index_copy_(0, at_places, h);
    if (c.defined()) batch.output_rows(2, shape.hidden).index_copy_(0, at_places, c);
  }

  // Returns the part of `all`, the values that forward kept, for the members that a gradient has
  // reached.
  static KeptRun rows_reached(const BackwardBatch& batch, const Shape& shape, const KeptRun& all) {
    KeptRun some(batch, shape);
    const Tensor rows =
        index_tensor(all.sequences.rows_of(some.sequences, batch.positions()), all.inputs.front());
    for (const Tensor& input : all.inputs) some.inputs.push_back(input.index_select(0, rows));
    for (const Trace& trace : all.traces) some.traces.push_back(trace.at_rows(rows));
    return some;
  }

  // Gradients of the final and initial states of all members, as rows.
  class StateGradients {
   public:
    StateGradients(BackwardBatch& batch, const Shape& shape) {
      for (size_t k = 1; k <= shape.num_states(); ++k) {
        final_.push_back(batch.grad_rows(k, k == 1 ? shape.output : shape.hidden));
        initial_.push_back(batch.needs(k) ? at::zeros_like(final_.back()) : Tensor());
      }
    }
    bool wanted() const {
      return initial_[0].defined() || (initial_.size() == 2 && initial_[1].defined());
    }
    Tensor final(size_t k, const Tensor& rows) const {
      return k < final_.size() ? final_[k].index_select(0, rows) : Tensor();
    }
    void set_initial(size_t k, const Tensor& rows, const Tensor& gradient) {
      if (k < initial_.size() && initial_[k].defined()) {
        initial_[k].index_copy_(0, rows, gradient);
      }
    }
    void add_to(BackwardBatch& batch) const {
      for (size_t k = 0; k < initial_.size(); ++k) {
        if (initial_[k].defined()) batch.add(k + 1, initial_[k]);
      }
    }

   private:
    std::vector<Tensor> final_, initial_;
  };

  // Whether the gradient of the input of `layer` is needed to compute the gradient of any operand.
  static bool needs_below(BackwardBatch& batch, const Shape& shape, int64_t layer) {
    bool needs = batch.needs(0);
    for (size_t k = 1; layer > 0 && k <= shape.num_states(); ++k) needs = needs || batch.needs(k);
    const size_t end = shape.first_param(layer * shape.directions);
    for (size_t slot = shape.first_param(0); slot < end && !needs; ++slot)
      needs = batch.needs(slot);
    return needs;
  }

  static void backward_run(BackwardBatch& batch, const Shape& shape, const KeptRun& kept,
                           int64_t run, const Tensor& gy, StateGradients& states, Tensor* g_input) {
    const Direction d = direction_of(batch, shape, run);
    const Trace& trace = kept.traces[run];
    if (kept.sequences.packing().steps() > 1 || states.wanted()) {
      batch.check_unwritten(shape.hidden_weight(run));
    }
    if (shape.projected) batch.check_unwritten(shape.projection(run));
    if (g_input != nullptr) batch.check_unwritten(shape.first_param(run));
    const Tensor at_places = index_tensor(kept.sequences.states(run, shape.runs()), gy);
    const Tensor gh = states.final(0, at_places);
    const Tensor gc = states.final(1, at_places);
    const GateGradients g =
        run_recurrence_backward(kept.sequences.packing(), d, trace, gy, gh, gc, states.wanted());
    states.set_initial(0, at_places, gh);
    states.set_initial(1, at_places, gc);
    add_to_weights(batch, shape, run, g, trace, kept.inputs[run / shape.directions]);
    if (g_input == nullptr) return;
    if (g_input->defined()) {
      add_multiplied(*g_input, g.from_x, d.w_ih);
    } else {
      *g_input = multiply(g.from_x, d.w_ih, nullptr);
    }
  }

  static void add_to_weights(BackwardBatch& batch, const Shape& shape, int64_t run,
                             const GateGradients& g, const Trace& trace, const Tensor& x) {
    const size_t first = shape.first_param(run);
    if (batch.needs(first)) batch.add_product(first, g.from_x, x);
    if (batch.needs(first + 1)) batch.add_product(first + 1, g.from_h, trace.h);
    if (shape.biases && (batch.needs(first + 2) || batch.needs(first + 3))) {
      const Tensor of_x = g.from_x.sum(0, /*keepdim=*/true);
      const bool same = g.from_h.is_same(g.from_x);
      const Tensor of_h = same ? of_x : g.from_h.sum(0, /*keepdim=*/true);
      if (batch.needs(first + 2)) batch.add_product(first + 2, of_x, Tensor());
      if (batch.needs(first + 3)) batch.add_product(first + 3, of_h, Tensor());
    }
    const size_t projection = shape.projection(run);
    if (shape.projected && batch.needs(projection)) {
      batch.add_product(projection, g.projected, trace.unprojected);
    }
  }

  std::vector<Tensor> replay_layer(const Signature& signature, const Form& form,
                                   at::ArrayRef<Tensor> operands, int64_t layer,
                                   const Tensor& x) const {
    const int64_t first_run = layer * form.directions;
    const auto state = [&](size_t k) { return operands[k].narrow(0, first_run, form.directions); };
    const size_t begin = form.first_param(first_run);
    const size_t end = form.first_param(first_run + form.directions);
    torch::jit::Stack stack(signature.arguments.begin(), signature.arguments.end());
    stack[0] = x;
    if (form.num_states() == 2) {
      stack[1] = c10::List<Tensor>({state(1), state(2)});
    } else {
      stack[1] = state(1);
    }
    stack[2] = c10::List<Tensor>(operands.slice(begin, end - begin));
    stack[4] = int64_t{1};
    stack[5] = 0.0;
    signature.op->handle.callBoxed(stack);
    std::vector<Tensor> out;
    for (const c10::IValue& value : stack) out.push_back(value.toTensor());
    return out;
  }

  Cell cell_;
};

}  // namespace

RuleTable rnn_rules() {
  return {{"aten::lstm.input", new RecurrentLayerRule(Cell::kLstm)},
          {"aten::gru.input", new RecurrentLayerRule(Cell::kGru)},
          {"aten::rnn_tanh.input", new RecurrentLayerRule(Cell::kTanh)},
          {"aten::rnn_relu.input", new RecurrentLayerRule(Cell::kRelu)}};
}

}  // namespace autobatch
