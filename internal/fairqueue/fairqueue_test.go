package fairqueue

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// waiter is a place as the model knows it.
type waiter struct {
	client int
	place  *Place[int, int]
	others map[int]int // how many of each other client were served since it became the oldest of its client
}

// model is what waits, in the order in which it came.
type model []*waiter

func (m model) of(client int) (all model) {
	for _, w := range m {
		if w.client == client {
			all = append(all, w)
		}
	}
	return all
}

// oldest reports whether a waiter is the oldest of its client.
func (m model) oldest(w *waiter) bool { return m.of(w.client)[0] == w }

func (m model) without(place *Place[int, int]) model {
	return slices.DeleteFunc(slices.Clone(m), func(w *waiter) bool { return w.place == place })
}

// TestClientsAreServedInTurn: whatever is added, served and removed, what is served is the oldest of its client, and none waits for two of another
// client once it is the oldest of its own.
func TestClientsAreServedInTurn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q Queue[int, int]
		var m model
		var gone []*Place[int, int]
		client := rapid.IntRange(0, 4)
		for value := range 100 {
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0, 1:
				c := client.Draw(t, "client")
				m = append(m, &waiter{client: c, place: q.Push(c, value), others: map[int]int{}})
			case 2:
				if len(m) > 0 {
					gone = append(gone, serve(t, &q, &m))
				}
			case 3:
				if len(m) > 0 {
					p := rapid.SampledFrom(m).Draw(t, "who").place
					if m = m.without(p); !q.Remove(p) {
						t.Fatal("a place that waits was not removed")
					}
					gone = append(gone, p)
				}
			}
			m.compare(t, &q)
		}
		for _, p := range gone {
			if q.Remove(p) {
				t.Fatal("a place that does not wait was removed")
			}
		}
		for len(m) > 0 {
			serve(t, &q, &m)
		}
		m.compare(t, &q)
	})
}

// serve serves the next of a queue.
func serve(t *rapid.T, q *Queue[int, int], m *model) *Place[int, int] {
	next := q.Next()
	w := (*m)[slices.IndexFunc(*m, func(w *waiter) bool { return w.place == next })]
	if !m.oldest(w) {
		t.Fatalf("%d of client %d was served before an older one", next.Value, w.client)
	}
	if v := q.Pop(); v != next.Value {
		t.Fatalf("%d was served, and it was the turn of %d", v, next.Value)
	}
	for _, other := range *m {
		if other.client == w.client || !m.oldest(other) {
			continue
		}
		if other.others[w.client]++; other.others[w.client] > 1 {
			t.Fatalf("%d of client %d waited for two of client %d", other.place.Value, other.client, w.client)
		}
	}
	*m = m.without(next)
	return next
}

// compare compares what can be asked of a queue.
func (m model) compare(t *rapid.T, q *Queue[int, int]) {
	most := 0
	for client := range 5 {
		all := m.of(client)
		if q.Of(client) != len(all) {
			t.Fatalf("%d of client %d wait, not %d", q.Of(client), client, len(all))
		}
		most = max(most, len(all))
		if oldest := q.Oldest(client); (oldest == nil) != (len(all) == 0) || oldest != nil && oldest != all[0].place {
			t.Fatalf("the oldest of client %d is %v, of %d", client, oldest, len(all))
		}
	}
	if q.Len() != len(m) || (q.Next() == nil) != (len(m) == 0) {
		t.Fatalf("%d wait, not %d; next is %v", q.Len(), len(m), q.Next())
	}
	newest, n := q.Longest()
	if n != most {
		t.Fatalf("the most that wait of a client are %d, not %d", n, most)
	}
	if n > 0 {
		if all := m.of(newest.line.client); len(all) != most || all[most-1].place != newest {
			t.Fatalf("%d is not the newest of a client of which the most wait", newest.Value)
		}
	}
}
