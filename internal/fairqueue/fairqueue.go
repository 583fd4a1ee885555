// Package fairqueue has a queue from which clients are served in turn, and what waits of a client in the order in which it came: however much of a
// client waits, what another client adds waits for one of each client at most.
//
// The queue has no bound. Its user bounds it, with Len or with Longest. Longest takes time in proportion to the clients of which something waits, and the
// other methods take a constant time.
package fairqueue

import "container/list"

// Queue is a queue of values of clients. The zero value is empty. The caller has a mutex.
type Queue[Client comparable, Value any] struct {
	lines map[Client]*line[Client, Value] // each has places
	turns list.List                       // the same, in the order of their next turns
	count int                             // places of all lines
}

// line is what waits of a client.
type line[Client comparable, Value any] struct {
	client Client
	places list.List     // of *Place, oldest first
	turn   *list.Element // in the queue
}

func (l *line[Client, Value]) oldest() *Place[Client, Value] {
	return l.places.Front().Value.(*Place[Client, Value])
}

// Place is a value in a queue.
type Place[Client comparable, Value any] struct {
	Value Value
	line  *line[Client, Value] // nil: the queue has it no more
	at    *list.Element        // in the line
}

// Len is how many values wait.
func (q *Queue[Client, Value]) Len() int { return q.count }

// Of is how many values of a client wait.
func (q *Queue[Client, Value]) Of(client Client) int {
	if l := q.lines[client]; l != nil {
		return l.places.Len()
	}
	return 0
}

// Push adds a value of a client. A client of which nothing waits has its turn after all others.
func (q *Queue[Client, Value]) Push(client Client, v Value) *Place[Client, Value] {
	l := q.lines[client]
	if l == nil {
		if q.lines == nil {
			q.lines = map[Client]*line[Client, Value]{}
		}
		l = &line[Client, Value]{client: client}
		q.lines[client], l.turn = l, q.turns.PushBack(l)
	}
	p := &Place[Client, Value]{Value: v, line: l}
	p.at = l.places.PushBack(p)
	q.count++
	return p
}

// first is the line whose turn it is. Something waits.
func (q *Queue[Client, Value]) first() *line[Client, Value] {
	return q.turns.Front().Value.(*line[Client, Value])
}

// Next is the place whose turn it is; nil if nothing waits.
func (q *Queue[Client, Value]) Next() *Place[Client, Value] {
	if q.count == 0 {
		return nil
	}
	return q.first().oldest()
}

// Oldest is the place of a client that is served first of its places; nil if nothing of it waits.
func (q *Queue[Client, Value]) Oldest(client Client) *Place[Client, Value] {
	if l := q.lines[client]; l != nil {
		return l.oldest()
	}
	return nil
}

// Pop removes the place whose turn it is, and ends the turn of its client. Something waits.
func (q *Queue[Client, Value]) Pop() Value {
	l := q.first()
	p := l.oldest()
	q.turns.MoveToBack(l.turn)
	q.Remove(p)
	return p.Value
}

// Remove removes a place out of its turn. It reports false if the queue has it no more.
func (q *Queue[Client, Value]) Remove(p *Place[Client, Value]) bool {
	l := p.line
	if l == nil {
		return false
	}
	l.places.Remove(p.at)
	p.line, p.at = nil, nil
	q.count--
	if l.places.Len() == 0 {
		q.turns.Remove(l.turn)
		delete(q.lines, l.client)
	}
	return true
}

// Longest is the newest place of a client of which the most wait, and how many these are; nil if nothing waits.
func (q *Queue[Client, Value]) Longest() (newest *Place[Client, Value], count int) {
	for e := q.turns.Front(); e != nil; e = e.Next() {
		if l := e.Value.(*line[Client, Value]); l.places.Len() > count {
			newest, count = l.places.Back().Value.(*Place[Client, Value]), l.places.Len()
		}
	}
	return newest, count
}
