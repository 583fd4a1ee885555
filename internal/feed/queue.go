package feed

// queue are references in order. Its bound is that of its watch.
type queue struct {
	refs    []ref
	head    int
	bytes   int64 // to which the references are
	commits int64 // bytes of the commits to which they are, which stay in memory as a whole; without what is attached to them
}

// queueKept is how many references a queue without any keeps memory for.
const queueKept = 8

func (q *queue) len() int    { return len(q.refs) - q.head }
func (q *queue) first() *ref { return &q.refs[q.head] }

// push appends a reference, and returns by how much the memory of the queue has grown.
func (q *queue) push(r ref) (grown int64) {
	before := cap(q.refs)
	if q.len() == 0 || q.refs[len(q.refs)-1].commit != r.commit {
		q.commits += r.commit.memory()
	}
	if len(q.refs) == before && q.head > 0 && q.head >= before/2 {
		n := copy(q.refs, q.refs[q.head:])
		clear(q.refs[n:])
		q.refs, q.head = q.refs[:n], 0
	}
	q.refs = append(q.refs, r)
	q.bytes += r.bytes()
	return int64(cap(q.refs)-before) * refBytes
}

func (q *queue) pop() ref {
	r := *q.first()
	q.refs[q.head] = ref{}
	q.head++
	q.bytes -= r.bytes()
	if q.head == len(q.refs) {
		q.refs, q.head = q.refs[:0], 0
	}
	if q.len() == 0 || q.first().commit != r.commit {
		q.commits -= r.commit.memory()
	}
	return r
}

// shorten removes what comes before an operation from the first reference.
func (q *queue) shorten(from uint32) {
	r := q.first()
	q.bytes -= r.bytes()
	r.from = from
	q.bytes += r.bytes()
}

// free gives the memory of an empty queue back, and returns how much it was.
func (q *queue) free() int64 {
	freed := int64(cap(q.refs)) * refBytes
	*q = queue{}
	return freed
}

// shrink is free unless the queue is small.
func (q *queue) shrink() int64 {
	if cap(q.refs) <= queueKept {
		return 0
	}
	return q.free()
}
