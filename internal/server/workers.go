package server

import "sync"

// readersMax is how many reads of the direct transport wait for the device at once. Each takes a
// thread. More than a device serves at once gain nothing.
const readersMax = 256

// workers run what may wait, in the order in which it comes, in a bounded number of goroutines.
// Admission bounds what waits for one.
type workers struct {
	goroutines *sync.WaitGroup // that the workers belong to

	mu      sync.Mutex // a leaf; guards what follows
	running int
	queue   []task
}

// task is a function, and what follows it without the worker's place: it may wait for a client that takes nothing, and others need the place.
type task struct{ run, after func() }

// run runs a task soon.
func (w *workers) run(t task) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running == readersMax {
		w.queue = append(w.queue, t)
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
	if len(w.queue) == 0 {
		w.running--
		w.queue = nil
		return
	}
	t := w.queue[0]
	w.queue[0] = task{}
	w.queue = w.queue[1:]
	w.goroutines.Go(func() { w.do(t) })
}
