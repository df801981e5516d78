"""``bench pair``: what training has made of pairs that are not ours.

A pair is a folder with what the commands of a pair have written:

    data/    the target's answers     collab-llm pair collect --out PAIR/data
    exits/   its early exits          collab-llm train exits --out PAIR/exits
    draft/   a draft for it           collab-llm train draft --out PAIR/draft
    heads/   its Medusa heads         collab-llm train heads --out PAIR/heads

``measure`` has a function for each figure. What a folder does not hold is not measured.
"""
