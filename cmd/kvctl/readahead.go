package main

const (
	// readAheadBytes ends a part: large enough that handing it over costs nothing.
	readAheadBytes = 256 << 10
	// readAheadParts is how many parts may wait. With the one that is parsed and the one that is used there are six, of 256 KiB or one large record.
	readAheadParts = 4
)

// readAhead parses the records of a file in a goroutine of its own, while the records before them are sent. It ends with stop.
type readAhead struct {
	parts chan []parsed
	part  []parsed // what is left of the current one
	quit  chan struct{}
}

// parsed is an answer of a recordSource.
type parsed struct {
	record record
	line   int
	err    error
}

// closableSource is a source with something to close when its last record was parsed. No other goroutine uses it.
type closableSource interface{ close() }

func newReadAhead(source recordSource) *readAhead {
	r := &readAhead{parts: make(chan []parsed, readAheadParts), quit: make(chan struct{})}
	go r.run(source)
	return r
}

// run parses until the source has an error or its end, which is the last thing that next returns.
func (r *readAhead) run(source recordSource) {
	if s, ok := source.(closableSource); ok {
		defer s.close()
	}
	records := 0
	for last := false; !last; {
		part := make([]parsed, 0, records)
		for size := 0; size < readAheadBytes && !last; {
			var p parsed
			p.record, p.line, p.err = source.next()
			part, last = append(part, p), p.err != nil
			size += len(p.record.key) + len(p.record.value)
		}
		records = len(part)
		select {
		case r.parts <- part:
		case <-r.quit:
			return
		}
	}
}

// next implements recordSource. It is not called again after an error.
func (r *readAhead) next() (record, int, error) {
	if len(r.part) == 0 {
		r.part = <-r.parts
	}
	p := &r.part[0]
	r.part = r.part[1:]
	return p.record, p.line, p.err
}

// stop ends the goroutine. A read that waits for its input is not waited for: closing a file ends it, and standard input the process.
func (r *readAhead) stop() { close(r.quit) }
