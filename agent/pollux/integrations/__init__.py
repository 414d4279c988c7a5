"""Pollux inside the training loops of other libraries.

Hugging Face Trainer and Accelerate, Lightning, TensorBoard.

Each module needs its library, which the extra of the same name installs; nothing here is imported without being asked
for. All of them train through the same `pollux.attach` as a plain script, so that batch size, learning rate, noise
scale, checkpoints, drains and reports are the agent's in each.
"""
