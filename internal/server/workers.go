package server

import (
	"sync"

	"github.com/epochkv/epochkv/internal/fairqueue"
)

// readersMax is how many reads of the direct transport wait for the device at once. Each takes a
// thread. More than a device serves at once gain nothing.
const readersMax = 256

// workers run what may wait in a bounded number of goroutines, for clients in turn, and for each in the order in which it comes. Admission bounds what
// waits for one.
type workers struct {
	goroutines *sync.WaitGroup // that the workers belong to

	mu      sync.Mutex // a leaf; guards what follows
	running int
	queue   fairqueue.Queue[*streamClient, task]
}

// task is a function, and what follows it without the worker's place: it may wait for a client that takes nothing, and others need the place.
type task struct{ run, after func() }

// run runs a task of a connection soon.
func (w *workers) run(conn *connection, t task) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running == readersMax {
		w.queue.Push(conn.client(), t)
		return
	}
	w.running++
	w.goroutines.Go(func() { w.do(t) })
}

// do does a task in a place, which the next task has then.
func (w *workers) do(t task) {
	t.run()
	w.leave()
	t.after()
}

func (w *workers) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.queue.Len() == 0 {
		w.running--
		return
	}
	t := w.queue.Pop()
	w.goroutines.Go(func() { w.do(t) })
}
