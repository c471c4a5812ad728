#include "autobatch/rules/rule.h"

#include "autobatch/rules/local_autograd.h"

#include <unordered_map>

namespace autobatch {

std::vector<const Rule*> find_native_rules(std::string_view op) {
  static const auto* rules = [] {
    auto* map = new std::unordered_map<std::string_view, std::vector<const Rule*>>();
    for (const auto& table :
         {elementwise_rules(), pool_rules(),       conv_rules(),        encoder_rules(),
          attention_rules(),   matmul_rules(),     product_rules(),     recurrent_rules(),
          rnn_rules(),         reduce_rules(),     shape_rules(),       index_rules(),
          scatter_rules(),     batch_norm_rules(), loss_rules(),        random_rules(),
          memory_rules(),      row_rules(),        tail_rules(),        triangle_rules(),
          point_loss_rules(),  group_norm_rules(), glu_rules(),         ctc_rules(),
          sparse_rules(),      complex_rules(),    generic_exceptions()}) {
      for (const RuleEntry& entry : table) (*map)[entry.op].push_back(entry.rule);
    }
    return map;
  }();
  const auto found = rules->find(op);
  return found == rules->end() ? std::vector<const Rule*>() : found->second;
}

std::vector<at::Tensor> Rule::eager(const Signature& signature, at::ArrayRef<at::Tensor> operands,
                                    at::ArrayRef<at::Tensor>) const {
  torch::jit::Stack stack = rebuild(signature, operands);
  signature.op->handle.callBoxed(stack);
  return results_of(stack);
}

std::vector<at::Tensor> Rule::replay(const Signature& signature, at::ArrayRef<at::Tensor> operands,
                                     at::ArrayRef<at::Tensor> computed) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !signature.op->random, "torch_autobatch: backward with create_graph=True through ",
      signature.op->name,
      " in a batch() block is not possible, because the random numbers of the op were not stored. "
      "Run the op outside batch().");
  return eager(signature, operands, computed);
}

}  // namespace autobatch
