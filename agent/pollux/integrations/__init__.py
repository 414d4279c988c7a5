"""Pollux inside the training loops of other libraries.

Hugging Face Trainer and Accelerate, Lightning, JAX, Keras.

Each module needs its library, which the extra of the same name installs. `import pollux` imports none of these modules.
All of them train through the same `pollux.attach` as a plain script, so the agent handles batch size, learning rate,
noise scale, checkpoints, drains and reports in the same way.
"""
