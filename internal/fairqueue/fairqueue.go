// Package fairqueue has a queue from which clients are served in turn, and what waits of a client in the order in which it came: however much of a
// client waits, what another client adds waits for one of each client at most.
//
// The queue has no bound. Its user bounds it, with Len or with Longest. Longest takes time in proportion to the clients of which something waits, and the
// other methods take a constant time.
package fairqueue

// Queue is a queue of values of clients. The zero value is empty. The caller has a mutex.
type Queue[Client comparable, Value any] struct {
	lines map[Client]*line[Client, Value] // each has places
	first *line[Client, Value]            // whose turn it is; the lines are a ring in the order of their next turns
	count int                             // places of all lines
}

// line is what waits of a client.
type line[Client comparable, Value any] struct {
	client         Client
	count          int
	oldest, newest *Place[Client, Value]
	before, after  *line[Client, Value] // in the ring
}

// Place is a value in a queue.
type Place[Client comparable, Value any] struct {
	Value        Value
	line         *line[Client, Value] // nil: the queue has it no more
	older, newer *Place[Client, Value]
}

// Len is how many values wait.
func (q *Queue[Client, Value]) Len() int { return q.count }

// Of is how many values of a client wait.
func (q *Queue[Client, Value]) Of(client Client) int {
	if l := q.lines[client]; l != nil {
		return l.count
	}
	return 0
}

// Push adds a value of a client. A client of which nothing waits has its turn after all others.
func (q *Queue[Client, Value]) Push(client Client, v Value) *Place[Client, Value] {
	l := q.lines[client]
	if l == nil {
		l = q.add(client)
	}
	p := &Place[Client, Value]{Value: v, line: l, older: l.newest}
	if l.newest == nil {
		l.oldest = p
	} else {
		l.newest.newer = p
	}
	l.newest = p
	l.count++
	q.count++
	return p
}

// add adds a line to the end of the ring.
func (q *Queue[Client, Value]) add(client Client) *line[Client, Value] {
	l := &line[Client, Value]{client: client}
	if q.lines == nil {
		q.lines = map[Client]*line[Client, Value]{}
	}
	q.lines[client] = l
	if q.first == nil {
		l.before, l.after, q.first = l, l, l
		return l
	}
	l.before, l.after = q.first.before, q.first
	l.before.after, l.after.before = l, l
	return l
}

// Next is the place whose turn it is; nil if nothing waits.
func (q *Queue[Client, Value]) Next() *Place[Client, Value] {
	if q.count == 0 {
		return nil
	}
	return q.first.oldest
}

// Oldest is the place of a client that is served first of its places; nil if nothing of it waits.
func (q *Queue[Client, Value]) Oldest(client Client) *Place[Client, Value] {
	if l := q.lines[client]; l != nil {
		return l.oldest
	}
	return nil
}

// Pop removes the place whose turn it is, and ends the turn of its client. Something waits.
func (q *Queue[Client, Value]) Pop() Value {
	p := q.first.oldest
	q.first = q.first.after
	q.Remove(p)
	return p.Value
}

// Remove removes a place out of its turn. It reports false if the queue has it no more.
func (q *Queue[Client, Value]) Remove(p *Place[Client, Value]) bool {
	l := p.line
	if l == nil {
		return false
	}
	if p.older == nil {
		l.oldest = p.newer
	} else {
		p.older.newer = p.newer
	}
	if p.newer == nil {
		l.newest = p.older
	} else {
		p.newer.older = p.older
	}
	p.line, p.older, p.newer = nil, nil, nil
	q.count--
	if l.count--; l.count == 0 {
		q.drop(l)
	}
	return true
}

// drop removes a line from the ring.
func (q *Queue[Client, Value]) drop(l *line[Client, Value]) {
	delete(q.lines, l.client)
	l.before.after, l.after.before = l.after, l.before
	switch {
	case q.count == 0:
		q.first = nil
	case q.first == l:
		q.first = l.after
	}
}

// Longest is the newest place of a client of which the most wait, and how many these are; nil if nothing waits.
func (q *Queue[Client, Value]) Longest() (newest *Place[Client, Value], count int) {
	l := q.first
	for range q.lines {
		if l.count > count {
			newest, count = l.newest, l.count
		}
		l = l.after
	}
	return newest, count
}
