"""Episodes of different lengths in one call of a recurrent layer.

    steps, state, sizes = pack_episodes(first, states[0], columns)
    hidden, _ = lstm(PackedSequence(features[steps], sizes), state)

The hidden states are those of a loop over the steps that sets the state to zero where an episode
begins; one call is faster.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence


def pack_episodes(first: Tensor, state: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of some environments, split at episode starts and packed for one recurrent call.

    `first` is (num_steps, num_envs), `state` the recurrent state before the first of these steps.
    Returns the steps of the packed episodes, as indices into the flat rollout, the initial state of
    each episode, and the number of episodes at each time step.
    """
    num_envs = first.shape[1]
    device = state.device
    begins = first[:, columns].T.clone()
    begins[:, 0] = True  # of the rollout, if not of an episode
    steps = torch.arange(first.numel()).view_as(first)[:, columns].T.flatten()
    episodes = steps.tensor_split(begins.flatten().nonzero().flatten()[1:])
    episodes = sorted(episodes, key=len, reverse=True)
    packed = pack_sequence(episodes)
    start = torch.stack([episode[0] for episode in episodes]).to(device)
    # an episode that was open when the rollout began has a state; the others begin with zeros
    state = state[:, start % num_envs] * (start < num_envs).unsqueeze(-1)
    return packed.data.to(device), state, packed.batch_sizes
