"""Methods of conversion: turn the KV heads of a group into one head.

Shape letters: H query heads, K KV heads of the source, G groups, M members of one group, Q query heads of one KV head,
X heads of either kind; D head dim, R rows of one head in some tensor, F rotary planes, P rows of a head that pass
unrotated; C hidden width, E = C + 1, the input with a constant 1 for biases.
"""
