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
	queue   []func()
}

// run runs f soon.
func (w *workers) run(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running == readersMax {
		w.queue = append(w.queue, f)
		return
	}
	w.running++
	w.goroutines.Go(func() {
		for f != nil {
			f()
			f = w.next()
		}
	})
}

// next takes the next function, or nil: then the worker ends.
func (w *workers) next() (f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		w.running--
		w.queue = nil
		return nil
	}
	f, w.queue[0] = w.queue[0], nil
	w.queue = w.queue[1:]
	return f
}
