package mvcc

// An operation of an InvokeAll takes memory beside its key and values: messages, what it is to do, its outcome, and the batch. Of a commit of many
// short values that is most of it, and it reads about as much as it has and writes. So what such a request has, what it reads, and what it writes are
// each limited together with its operations, and its keys count twice: until the old values are known, the batch has others in place of its operations,
// and when they are known, it has room for the records of the keys.
const (
	// InvokeOperationBytes is what each operation counts against Limits.InvokeBytes. A server has room for three copies of so many bytes, and an
	// operation takes a bit more than 500.
	InvokeOperationBytes = 175
	// InvokeOperationsFree is how many operations count nothing: so few take less than a megabyte, and may have all of Limits.BatchBytes as values.
	InvokeOperationsFree = 1000
)

// invokeRoom is how many bytes an InvokeAll may read, and how many it may write.
type invokeRoom struct {
	limit      int
	counted    int // the keys twice, and what the operations count
	operations int // part of counted
}

// roomOf is the room of an InvokeAll with these operations.
func (l *Limits) roomOf(ops []Invoke) invokeRoom {
	r := invokeRoom{limit: l.InvokeBytes, operations: InvokeOperationBytes * (len(ops) - InvokeOperationsFree)}
	if r.operations <= 0 {
		return invokeRoom{limit: l.BatchBytes}
	}
	r.counted = r.operations
	for i := range ops {
		r.counted += 2 * len(ops[i].Key)
	}
	if r.left() >= l.BatchBytes {
		return invokeRoom{limit: l.BatchBytes}
	}
	return r
}

// left is how many bytes of values there is room for.
func (r *invokeRoom) left() int { return r.limit - r.counted }

// check refuses values of so many bytes if there is no room for them.
func (r *invokeRoom) check(values int) error {
	if values <= r.left() {
		return nil
	}
	return &LimitError{What: "batch bytes", Limit: r.limit, Got: r.counted + values, Operations: r.operations}
}

// checkRequest refuses an InvokeAll that has too much of its own.
func (r *invokeRoom) checkRequest(ops []Invoke) error {
	if r.operations == 0 {
		return nil // the batch is checked
	}
	size := 0
	for i := range ops {
		size += len(ops[i].Operand) + len(ops[i].Expect)
	}
	return r.check(size)
}

// CheckOperations refuses the transaction of one request of so many operations if it has become too large together with them. Size has the keys twice, too:
// those that it reads, and those that it writes.
func (t *Txn) CheckOperations(operations int) error {
	limit, counted := t.session.store.options.Limits.InvokeBytes, InvokeOperationBytes*(operations-InvokeOperationsFree)
	if size := t.Size() + counted; counted > 0 && size > limit {
		return &LimitError{What: "batch bytes", Limit: limit, Got: size, Operations: counted}
	}
	return nil
}
