"""Recurrent layers over many steps and episodes in one call.

    hidden, state = run_sequences(lstm, features, state, first)

computes what this loop over the steps computes, and is faster:

    for t in range(num_steps):
        state = state * ~first[t].unsqueeze(-1)     # zeros where an episode begins
        hidden[t], state = lstm(features[t], state)
"""

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

Recurrent: TypeAlias = nn.GRU | nn.LSTM


def run_sequences(
    rnn: Recurrent, features: Tensor, state: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states, (num_steps, num_envs, size), and the state after the last step.

    `features` is (num_steps, num_envs, inputs) and `first`, (num_steps, num_envs), marks the first
    observations of episodes. `state`, (parts, num_envs, size), is the state before the first step;
    an LSTM has two parts, hidden state and cell state.

    The sequences are split where episodes begin and packed. One step needs no packing, so that it
    can be part of a CUDA graph.
    """
    if len(first) == 1:
        return call(rnn, features, state * ~first[0].unsqueeze(-1))
    num_steps, num_envs = first.shape
    device = features.device
    first = first.cpu()

    # the sequences, one environment after another: episodes, or the parts of them in this rollout
    begins = first.T.clone()  # (num_envs, num_steps)
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    steps = torch.arange(first.numel()).view_as(first).T.flatten()  # indices into flat features
    packed = pack_sequence(steps.tensor_split(starts[1:]), enforce_sorted=False)
    order = packed.data.to(device)
    indices = (packed.sorted_indices.to(device), packed.unsorted_indices.to(device))
    sequences = PackedSequence(features.flatten(0, 1)[order], packed.batch_sizes, *indices)

    # an episode that was open before the first step has a state; the others begin with zeros
    env = starts // num_steps
    is_open = ~first.T.flatten()[starts]
    initial_state = state[:, env.to(device)] * is_open.to(device).unsqueeze(-1)

    hidden, final_state = call(rnn, sequences, initial_state)
    hidden = hidden.data[order.argsort()].view(num_steps, num_envs, -1)
    last_of_env = begins.sum(1).cumsum(0) - 1
    return hidden, final_state[:, last_of_env]


def call(rnn: Recurrent, inputs: Tensor | PackedSequence, state: Tensor) -> tuple:
    """Call a GRU or LSTM with a state of one tensor."""
    if isinstance(rnn, nn.GRU):
        return rnn(inputs, state)
    hidden, parts = rnn(inputs, state.split(1))
    return hidden, torch.cat(parts)
