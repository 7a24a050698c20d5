"""An objective of one's own: ASymPO's sibling that weighs every answer alike by its logprob's sign, REINFORCE with a baseline.

python examples/custom_objective.py
"""

from trtl_rl import Trainer, TrainerConfig
from trtl_rl.losses.loss import Loss, LossInputs, LossOutputs, imbalance_metrics, mean_over_groups


class TokenSum(Loss):
    """``L = -mean over groups of (1/G) sum_g A_g sum_i log p_i``: the sum over tokens where the others take the mean."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        sums_r = inputs.logprobs.new_zeros(inputs.lengths.numel()).index_add(0, inputs.rows(), inputs.logprobs)
        return LossOutputs(-mean_over_groups(inputs.advantages * sums_r, inputs), imbalance_metrics(inputs))


if __name__ == "__main__":
    args = TrainerConfig(steps=2, batch={"prompts": 4, "group_size": 4}, optimizer={"lr": 1e-4})
    print(Trainer(model="demo", args=args, loss=TokenSum()).train())
