package memtable

// Expected describes keys that tables will have although earlier keys do not tell: those that count on with the time. The
// heads of most keys are learned from the table before, but the keys of a time to come are after all that were learned
// from, so that all of them would have one head.
type Expected struct {
	Prefix []byte      // four bytes
	Bytes  []ByteRange // the values of the bytes after it
}

// ByteRange are the values from the least to the most.
type ByteRange struct{ Least, Most byte }

// expectedPrefix is the length of the prefix of expected keys.
const expectedPrefix = 4

// The parts of the heads that keys before the expected ones and the expected ones have.
const (
	headsBefore   = allHeads / 16
	headsExpected = allHeads / 4
)

// expectedHeads are the heads of expected keys, and of the keys before them.
type expectedHeads struct {
	mark   uint32 // the prefix
	group  headGroup
	before groupedHeads
}

// newHeads are the heads of the keys after the expected ones and of those before them, which grouped makes, and of the
// expected ones, if there are any.
func newHeads(e *Expected, grouped func(after bool, first, size uint64) groupedHeads) *Heads {
	if e == nil {
		return &Heads{groupedHeads: grouped(true, 0, allHeads)}
	}
	const after = headsBefore + headsExpected
	expected := &expectedHeads{
		mark: first32(e.Prefix), group: headGroup{first: headsBefore, size: headsExpected}, before: grouped(false, 0, headsBefore),
	}
	values := make([]byteValues, len(e.Bytes))
	for i, b := range e.Bytes {
		values[i] = byteValues{least: b.Least, most: b.Most, some: true}
	}
	expected.group.choose(values)
	return &Heads{groupedHeads: grouped(true, after, allHeads-after), expected: expected}
}

// around are the keys of a sorted sample before the expected ones and after them.
func (e *Expected) around(sample [][]byte) (before, after [][]byte) {
	if e == nil {
		return nil, sample
	}
	mark, n := first32(e.Prefix), 0
	for n < len(sample) && first32(sample[n]) < mark {
		n++
	}
	before = sample[:n]
	for n < len(sample) && first32(sample[n]) == mark {
		n++
	}
	return before, sample[n:]
}
