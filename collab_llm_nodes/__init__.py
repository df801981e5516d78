"""collab_llm: edge-cloud collaborative decoding for ROS 2 robots."""

import logging

# Transformers imports torchao where it is installed; it warns of each GPU library that is not.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
