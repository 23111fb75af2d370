"""The layout of an edit program: what each column of the tables that the tap reads means."""
from __future__ import annotations

# rows, int32: what a row of the batch does. -1 in PROGRAM and PLAN is neutral.
PROGRAM, PLAN, BASE, POSITION, SLOT, HISTORY = range(6)
ROW_COLUMNS = 6

# index, int32: a program's terms at one point. A program of one plain addition is written out here as well, so that it
# costs the tap one read less: the place of its vector (-1 otherwise) and the bits of its coefficient.
FIRST, COUNT, PLAIN, PLAIN_COEFF = range(4)
INDEX_COLUMNS = 4

# words, int32, one line a term.
OP, READ, WRITE, GATE, FIRST_COLUMN, LAST_COLUMN, ORIGIN, FLAGS = range(8)
# numbers, float32, beside the words.
COEFF, SLOPE, OFFSET, LOW, HIGH, RATE, THRESHOLD, LEVEL = range(8)
COLUMNS = 8

# OP. p is the reading: the value the term sees, times its READ vector.
ADD = 0  # value += coeff * WRITE
AFFINE = 1  # value += coeff * (slope * p + offset) * WRITE
CLIP = 2  # value += coeff * (min(max(p, low), high) - p) * WRITE
FEATURE = 3  # value += coeff * (low - jumprelu(p + offset)) * WRITE, the unit firing above `threshold`
SCALE = 4  # value += coeff * what the term sees, on its columns
RENORM = 5  # value *= norm of what the term sees / norm of value
MEASURE = 6  # value stays; the row's accumulator of GATE takes the reading
BIAS = 7  # attention: coeff is added to the scores of the keys in [FIRST_COLUMN, LAST_COLUMN), or is their share where slope is set
OPS = ("add", "affine", "clip", "feature", "scale", "renorm", "measure", "bias")

# FLAGS.
FRESH = 1  # the term, and those after it, see the value as it is now; without it, what the term before it saw
PER_ROW = 2  # its gate is the row's accumulator passing LEVEL; without it, the position from which the request's gate is open
ALIGNED = 4  # WRITE is a block of vectors, one a position from ORIGIN on
COSINE = 8  # measure: p / |value - WRITE| with WRITE as the mean; without it, p itself
VOTE = 16  # measure: 1 where coeff * reading passes the threshold; without it, coeff * reading
BEGINS = 32  # measure: the first of the row's measures for this gate
