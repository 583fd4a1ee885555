package feed

import (
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// reading is what a reader keeps from one group to the next: the group after it nearly always goes on where the one before ended, and
// to open the file again and to read what is in memory already took a third of the reader's time.
type reading struct {
	log    *logReader // nil before the first group, and after an error
	pieces []piece

	// What the pieces refer to, until the next one is read.
	commits  []*Commit
	borrowed []Commit // of these, the ones of which the memory is that of the reader
	spans    []span
	wanted   []**Commit
	runs     []run
}

// piece is what the log has after an epoch, up to another.
type piece struct {
	after, through keys.Epoch
	at             wal.TailMark // where it begins
	commits        []*Commit
}

// piecesMax is how many pieces are read before they are offered.
const piecesMax = 64

// close gives back what the reader keeps.
func (r *reading) close() {
	if r.log != nil {
		r.log.close()
	}
	r.log = nil
}

// begin goes to a position of the log for a group.
func (r *reading) begin(f *Feed, g *group, next keys.Epoch, mark wal.TailMark) {
	if r.log != nil && (r.log.Position() == next || r.log.Seek(next, mark)) {
		r.log.group = g
		return
	}
	r.close()
	r.log = f.readLog(f.ctx, g, next, mark)
}

// readFor reads the log from a position on for a group, and returns how many bytes it read.
func (f *Feed) readFor(r *reading, g *group, start Position, mark wal.TailMark) int64 {
	r.begin(f, g, start.Epoch+1, mark)
	log, began, before := r.log, time.Now(), r.log.BytesRead()
	most := min(groupBytes, max(f.memory.queuesMax/8, 1))
	for more := true; more && log.BytesRead()-before <= most && time.Since(began) < groupTime; {
		next, ended, err := f.readPieces(r, g, most)
		if len(g.watches) == 1 {
			r.share(g.watches[0])
		}
		more = f.offerPieces(g, r.pieces) && !ended
		switch {
		case errors.Is(err, errQueued):
			more = false
		case err != nil:
			r.close() // the tree may have to become safe first, and others may read meanwhile
			f.gapFor(g, next, err)
			return log.BytesRead() - before
		}
	}
	log.release()
	f.markGroup(g, log.Position(), log.Mark())
	return log.BytesRead() - before
}

// readPieces reads what comes next: what is in memory, as much of it as is offered at a time, after at most one read. It returns what
// comes after that, and whether the log has nothing more for the group now. What was read before an error is to be offered.
func (f *Feed) readPieces(r *reading, g *group, bytesMax int64) (next keys.Epoch, ended bool, err error) {
	r.pieces, r.commits, r.spans = r.pieces[:0], r.commits[:0], r.spans[:0]
	stable, from := f.source.Stable(), f.ringBegin()
	for bytes := int64(0); len(r.pieces) < piecesMax && bytes < bytesMax; {
		next = r.log.Position()
		p := piece{after: next - 1, at: r.log.Mark()}
		if p.after >= from {
			return next, true, nil // the ring has the rest
		}
		var rec wal.TailRecord
		var ok bool
		if len(r.pieces) > 0 {
			rec, ok = r.log.More(stable)
		} else if rec, ok, err = r.log.next(stable); !ok {
			return next, true, err
		}
		if !ok {
			return next, false, nil
		}
		if rec.Skipped {
			f.refuseRemoved(g, &rec)
		}
		if p.commits, err = r.commitsOf(f, &rec, p.after); err != nil {
			return next, true, err
		}
		size := int64(len(rec.Body))
		p.through, bytes = rec.Epoch, bytes+size
		if size > g.largest {
			g.largest, g.largestAt = size, rec.Epoch
		}
		r.pieces = append(r.pieces, p)
	}
	return r.log.Position(), false, nil
}

// commitsOf are the commits of a record. Those of a record in the memory of the reader are borrowed.
func (r *reading) commitsOf(f *Feed, rec *wal.TailRecord, after keys.Epoch) (_ []*Commit, err error) {
	if rec.Owned || len(rec.Body) == 0 {
		return f.commitsOf(rec, after)
	}
	if r.borrowed == nil {
		r.borrowed = make([]Commit, piecesMax)
	}
	c := &r.borrowed[len(r.pieces)]
	c.feed, c.borrowed = f, true
	r.spans, err = c.read(rec.Epoch, rec.Body, r.spans)
	r.commits = append(r.commits, c)
	return r.commits[len(r.commits)-1:], err
}

// ringBegin is the epoch up to which the log is read for lagging watches: the ring has the rest. A gap of the log is one
// record, and may end after it.
func (f *Feed) ringBegin() keys.Epoch {
	f.lock()
	defer f.unlock()
	return f.ring.from
}

// refuseRemoved ends the watches of a group that say they have commits with epochs that a restart skipped: a repair of the
// log has removed them, or a crash that no sync preceded.
func (f *Feed) refuseRemoved(g *group, rec *wal.TailRecord) {
	f.lock()
	defer f.unlock()
	for _, w := range g.watches {
		if p := w.queued; w.group == g && p.Compare(Position{Epoch: rec.First - 1}) > 0 && p.Epoch < rec.Epoch {
			f.endLocked(w, &RemovedError{After: p, First: rec.First, Last: rec.Epoch})
		}
	}
}
