package storage

import (
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// Validation is how far the validation of a commit has come: the state that its first look saw, and the position in the
// log from which on commits are still to be looked at. It is valid like Pinned.
type Validation struct {
	Pinned
	segment *wal.Segment // of the active generation
	from    wal.Position
}

// LogPosition is a position in the log, between two commits.
type LogPosition = wal.Position

// BeginValidation takes the current state for a validation: it includes every epoch before the one that is returned,
// once they are all installed.
func (e *Engine) BeginValidation() (Validation, keys.Epoch) {
	p := e.Pin()
	active := p.view.active
	if active.segment == nil { // the one that a bulk load leaves takes no commits: ReserveValidated will say so
		end := keys.Epoch(active.end.Load())
		return Validation{Pinned: p, from: wal.Position{Epoch: end}}, end
	}
	from := active.segment.Position()
	return Validation{p, active.segment, from}, from.Epoch
}

// ResumeValidation lets a validation go on under another guard, and reports false if another generation has become the
// active one since: then it has to look at the memtables and the tree again.
func (e *Engine) ResumeValidation(v *Validation) bool {
	p := e.Pin()
	if v.segment == nil || p.view.active.segment != v.segment {
		return false
	}
	v.Pinned = p
	return true
}

// LogEnd is the end of the log in the generation of a validation, and the number of bytes up to there that the
// validation has not looked at.
func (v *Validation) LogEnd() (end wal.Position, bytes int) {
	if v.segment == nil { // left by a bulk load: everything in it is visible, and it takes no commits
		return v.from, 0
	}
	end = v.segment.Position()
	return end, v.from.BytesTo(end)
}

// VisitWritten calls visit with the internal keys of all commits from a validation's position up to end, in the order of
// their epochs, until it returns false. All of them are installed. The position moves to end. It reports false, and
// visits nothing, if the log does not have them in memory any more.
func (e *Engine) VisitWritten(v *Validation, end wal.Position, visit func(key []byte, epoch keys.Epoch) bool) bool {
	if v.segment == nil || !e.log.RetainBuffer(v.segment) {
		return false
	}
	visitRecords(v.segment, v.from, end, visit)
	e.log.ReturnBuffer(v.segment)
	v.from = end
	return true
}

// WrittenSince calls visit with the internal keys of all commits from a validation's position to the epoch that w has
// reserved since in the same generation (ReserveValidated), in the order of their epochs, until it returns false. All of
// them are installed, and w's record is not published yet, so that the log keeps the segment's buffer.
func (e *Engine) WrittenSince(v *Validation, w *Writer, visit func(key []byte, epoch keys.Epoch) bool) {
	visitRecords(w.generation.segment, v.from, w.reservation.Begin(), visit)
}

func visitRecords(segment *wal.Segment, at, end wal.Position, visit func(key []byte, epoch keys.Epoch) bool) {
	var ops batch.Reader
	for {
		body, epoch, ok := segment.Written(&at, end)
		if !ok {
			return
		}
		if body == nil {
			continue
		}
		if err := ops.Read(body); err != nil {
			panic("storage: a record that this process wrote is malformed: " + err.Error())
		}
		for ops.Next() {
			if !visit(ops.Key, epoch) {
				return
			}
		}
	}
}
