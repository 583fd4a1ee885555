package inspect

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// readQuarantine collects what the tree refused. Without a superblock it takes everything in both
// files: each version there was committed, even if it is old.
func (s *salvager) readQuarantine() error {
	read := s.files.ReadAllQuarantine
	if s.state != nil && !s.raw() {
		read = s.state.ReadQuarantine
	}
	versions, fault, err := read()
	for _, e := range joined(err) {
		if damage, ok := errors.AsType[*storage.CorruptionError](e); ok {
			s.lose(Damage{Kind: DamageQuarantine, File: damage.File, Reason: damage.Reason})
			err = nil
		}
	}
	if fault != nil {
		s.note("one copy of the quarantine file's contents is damaged, and the other one was read: %v", fault)
	}
	for i := range versions {
		v := &versions[i]
		if old, found := s.log[string(v.Key)]; !found || old.epoch < v.Trailer.Epoch() {
			value, f := s.split(v.Key, v.Trailer.Kind(), v.Value)
			s.log[string(v.Key)] = logged{epoch: v.Trailer.Epoch(), kind: v.Trailer.Kind(), metadata: f, value: value}
		}
	}
	return err
}

// joined are the errors of which errors.Join has made err.
func joined(err error) []error {
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		return all.Unwrap()
	}
	return []error{err}
}

// readLog collects the newest version of each key in what can be read of the log. It continues
// after damage.
func (s *salvager) readLog() error {
	segments, err := wal.Segments(s.files.FS, s.files.Dir)
	if err != nil {
		return err
	}
	proof := wal.Proof{}
	if s.state != nil {
		proof = s.state.LogProof()
	}
	next := s.report.Epoch + 1
	for i, segment := range segments {
		if segment.Superseded() || proof.Foreign(&segment) {
			continue
		}
		if segment.Damage != nil {
			if s.replayStartsIn(segments[i+1:]) {
				continue // everything that it can have is in the tree
			}
			s.lose(Damage{Kind: DamageLog, File: segment.File, Reason: segment.Damage.Error()})
			continue
		}
		if segment.First > next {
			s.lose(Damage{
				Kind: DamageLog, File: segment.File, Reason: fmt.Sprintf("epochs %d to %d are missing before it", next, segment.First-1),
			})
		}
		err := wal.ReadAroundDamage(s.files.FS, segment, lastBefore(segments[i+1:]), func(r wal.Record) error {
			if r.Epoch > next {
				s.lose(Damage{Kind: DamageLog, File: segment.File, Offset: r.Offset, Reason: fmt.Sprintf("epochs %d to %d cannot be read before it", next, r.Epoch-1)})
			}
			if !r.HoldsEpoch() {
				next = max(next, r.SkipsTo())
				return nil
			}
			next = max(next, r.Epoch+1)
			s.record(r)
			return s.ctx.Err()
		})
		if err != nil {
			return err
		}
	}
	// Where a segment ends early, only the replay can tell an unfinished record from a damaged one.
	_, err = wal.Replay(s.files.FS, s.files.Dir, s.report.Epoch, proof, func(keys.Epoch, []byte) error { return s.ctx.Err() })
	if foreign, ok := errors.AsType[*wal.LineageError](err); ok {
		s.lose(Damage{Kind: DamageLog, File: foreign.File, Reason: foreign.Error()})
		return nil
	}
	if damage, ok := errors.AsType[*wal.CorruptionError](err); ok {
		s.lose(Damage{
			Kind: DamageLog, File: damage.File, Offset: damage.Offset, Reason: fmt.Sprintf("from epoch %d on: %s", damage.Epoch, damage.Reason),
		})
		return nil
	}
	return err
}

// lastBefore is the last epoch before segments; zero if none of them tells.
func lastBefore(later []wal.SegmentInfo) keys.Epoch {
	for i := range later {
		if s := &later[i]; s.Damage == nil && !s.Superseded() {
			return s.First - 1
		}
	}
	return 0
}

// replayStartsIn reports whether one of the segments begins at or before the first epoch that the
// tree lacks.
func (s *salvager) replayStartsIn(segments []wal.SegmentInfo) bool {
	return slices.ContainsFunc(segments, func(later wal.SegmentInfo) bool { return later.Damage == nil && later.First <= s.report.Epoch+1 })
}

func (s *salvager) record(r wal.Record) {
	whole := r.Batch()
	if r.Epoch <= s.report.Epoch || len(whole) == 0 {
		return
	}
	var body batch.Reader
	if err := body.Read(whole); err != nil {
		s.lose(Damage{Kind: DamageLog, Reason: fmt.Sprintf("epoch %d: %v", r.Epoch, err)})
		return
	}
	for body.Next() {
		if old, found := s.log[string(body.Key)]; !found || old.epoch < r.Epoch {
			value, f := s.split(body.Key, body.Kind, body.Value)
			s.log[string(body.Key)] = logged{epoch: r.Epoch, kind: body.Kind, metadata: f, value: bytes.Clone(value)}
		}
	}
}

// writeLog passes on what is left: the versions of log and quarantine that are newer than the trees.
func (s *salvager) writeLog() error {
	for _, key := range slices.Sorted(maps.Keys(s.log)) {
		v := s.log[key]
		if !v.kind.HasValue() || keys.SpaceOf([]byte(key)) != keys.SpaceUser {
			continue
		}
		s.report.FromLog++
		if err := s.emit([]byte(key), v.value, v.epoch, &v.metadata); err != nil {
			return err
		}
	}
	return nil
}
