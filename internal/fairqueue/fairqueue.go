// Package fairqueue has a queue from which clients are served in turn, and what waits of a client in the order in which it came: however much of a
// client waits, what another client adds waits for one of each client at most.
//
// The queue has no bound. Its user bounds it, with Len or with Longest. Its methods take time in proportion to what waits, so it is for some hundreds.
package fairqueue

import "slices"

// Queue is a queue of values of clients. The zero value is empty. The caller has a mutex.
type Queue[Client comparable, Value any] struct {
	lines []*line[Client, Value] // in the order of their next turns; each has places
	count int                    // places of all lines
}

// line is what waits of a client.
type line[Client comparable, Value any] struct {
	client Client
	places []*Place[Client, Value] // oldest first
}

// Place is a value in a queue.
type Place[Client comparable, Value any] struct {
	Value  Value
	client Client
}

// Len is how many values wait.
func (q *Queue[Client, Value]) Len() int { return q.count }

// Of is how many values of a client wait.
func (q *Queue[Client, Value]) Of(client Client) int {
	if i := q.find(client); i >= 0 {
		return len(q.lines[i].places)
	}
	return 0
}

// Push adds a value of a client. A client of which nothing waits has its turn after all others.
func (q *Queue[Client, Value]) Push(client Client, v Value) *Place[Client, Value] {
	i := q.find(client)
	if i < 0 {
		i = len(q.lines)
		q.lines = append(q.lines, &line[Client, Value]{client: client})
	}
	p := &Place[Client, Value]{Value: v, client: client}
	q.lines[i].places = append(q.lines[i].places, p)
	q.count++
	return p
}

// Next is the place whose turn it is; nil if nothing waits.
func (q *Queue[Client, Value]) Next() *Place[Client, Value] {
	if q.count == 0 {
		return nil
	}
	return q.lines[0].places[0]
}

// Pop removes the place whose turn it is, and ends the turn of its client. Something waits.
func (q *Queue[Client, Value]) Pop() Value {
	first := q.lines[0]
	q.lines = append(slices.Delete(q.lines, 0, 1), first)
	p := first.places[0]
	q.Remove(p)
	return p.Value
}

// Remove removes a place out of its turn. It reports false if the queue has it no more.
func (q *Queue[Client, Value]) Remove(p *Place[Client, Value]) bool {
	i := q.find(p.client)
	if i < 0 {
		return false
	}
	l := q.lines[i]
	k := slices.Index(l.places, p)
	if k < 0 {
		return false
	}
	l.places = slices.Delete(l.places, k, k+1)
	q.count--
	if len(l.places) == 0 {
		q.lines = slices.Delete(q.lines, i, i+1)
	}
	return true
}

// Longest is the newest place of a client of which the most wait, and how many these are; nil if nothing waits.
func (q *Queue[Client, Value]) Longest() (newest *Place[Client, Value], count int) {
	for _, l := range q.lines {
		if n := len(l.places); n > count {
			newest, count = l.places[n-1], n
		}
	}
	return newest, count
}

func (q *Queue[Client, Value]) find(client Client) int {
	return slices.IndexFunc(q.lines, func(l *line[Client, Value]) bool { return l.client == client })
}
