package server

import (
	"context"
	"encoding/binary"
	"hash/crc32"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Bounds of an answer of History or Diff.
const (
	historyBytesMax     = 256 << 10
	historyCountDefault = 1000
	historyCountMax     = 10_000
	// diffKeysMax bounds the keys that one answer of Diff reads although they do not differ: some tenths of a second.
	diffKeysMax = 16 << 10
)

func historyCount(limit uint32) int {
	if limit == 0 {
		return historyCountDefault
	}
	return int(min(limit, historyCountMax))
}

// History implements Feed.
func (s *feedService) History(ctx context.Context, req *pb.HistoryRequest) (*pb.HistoryResponse, error) {
	out := new(pb.HistoryResponse)
	return out, s.runPast(ctx, func(c *executor) (ackWait, error) {
		o, hash, err := s.historyOptions(ctx, c.session, req)
		if err != nil {
			return ackWait{}, err
		}
		h, err := c.session.History(ctx, o)
		if err != nil {
			return ackWait{}, err
		}
		out.ToEpoch, out.OldestEpoch, out.OldestTimeUs = uint64(h.To), uint64(h.Oldest), h.OldestTime
		for i := range h.Versions {
			out.Versions = append(out.Versions, versionMessage(&h.Versions[i]))
		}
		if h.More {
			last := &h.Versions[len(h.Versions)-1]
			out.ResumeToken = s.appendPastToken(pastToken{from: o.From, to: h.To, key: last.Key, epoch: last.Epoch}, hash)
		}
		return ackRead(h.Await), c.checkAgain()
	})
}

func versionMessage(v *mvcc.KeyVersion) *pb.KeyVersion {
	m := &pb.KeyVersion{Key: v.Key, Epoch: uint64(v.Epoch), Kind: pb.EventKind_EVENT_KIND_SET, Value: v.Value, ExpiresAtMs: v.Metadata.ExpiresAt, TimeUs: v.Time}
	if v.Deleted {
		m.Kind = pb.EventKind_EVENT_KIND_DELETE
	}
	if v.Logged {
		m.Origin = originMessage(v.Origin)
	}
	return m
}

// historyOptions reads a request.
func (s *feedService) historyOptions(ctx context.Context, x *mvcc.Session, req *pb.HistoryRequest) (*mvcc.HistoryOptions, uint32, error) {
	b, err := toBounds(req.GetRange())
	if err != nil {
		return nil, 0, err
	}
	if key := req.GetKey(); len(key) > 0 {
		if req.GetRange() != nil {
			return nil, 0, invalid("range", "must be unset with a key")
		}
		b = bounds{lower: key, upper: append(append(make([]byte, 0, len(key)+1), key...), 0)}
	}
	o := &mvcc.HistoryOptions{
		Lower: b.lower, Upper: b.upper, Values: !req.GetKeysOnly(),
		Count: historyCount(req.GetLimit()), Bytes: historyBytesMax, Keep: s.config.SnapshotLeaseTTL, Client: networkOf(ctx),
	}
	p, hash, err := s.pastOf(ctx, x, req, b, historyToken)
	if err == nil && p.key != nil && p.epoch == 0 {
		err = invalidToken("is damaged")
	}
	o.From, o.To, o.AfterKey, o.AfterEpoch = p.from, p.to, p.key, p.epoch
	return o, hash, err
}

// pastRequest is what requests of History and Diff have in common.
type pastRequest interface {
	GetFromEpoch() uint64
	GetFromTimeUs() uint64
	GetToEpoch() uint64
	GetToTimeUs() uint64
	GetResumeToken() []byte
}

// pastOf reads between which epochs a request is, and where the answer before ended, if there was one. The number distinguishes
// requests, for tokens.
func (s *feedService) pastOf(ctx context.Context, x *mvcc.Session, req pastRequest, b bounds, kind uint64) (p pastToken, hash uint32, err error) {
	hash = hashPast(b, kind, req.GetFromEpoch(), req.GetFromTimeUs(), req.GetToEpoch(), req.GetToTimeUs())
	if len(req.GetResumeToken()) > 0 {
		p, err = s.readPastToken(req.GetResumeToken(), hash)
		if err == nil && !within(p.key, b.lower, b.upper) {
			err = invalidToken("belongs to another request")
		}
		return p, hash, err
	}
	if p.from, err = namedEpoch(ctx, x, req.GetFromEpoch(), req.GetFromTimeUs(), "from_time_us"); err == nil {
		p.to, err = epochAfter(ctx, x, p.from, req.GetToEpoch(), req.GetToTimeUs())
	}
	return p, hash, err
}

// epochAfter is the end of a history or a comparison, which must not be before its begin.
func epochAfter(ctx context.Context, x *mvcc.Session, from keys.Epoch, epoch, at uint64) (keys.Epoch, error) {
	to, err := namedEpoch(ctx, x, epoch, at, "to_time_us")
	if err == nil && to != 0 && from > to {
		err = invalidRange("from is after to")
	}
	return to, err
}

// runPast is run for a read of the past.
func (s *feedService) runPast(ctx context.Context, execute func(*executor) (ackWait, error)) error {
	conn := connectionOf(ctx)
	if err := s.admission.holdPast(conn); err != nil {
		return err
	}
	defer s.admission.releasePast(conn)
	return s.run(ctx, execute)
}

// Diff implements Feed.
func (s *feedService) Diff(ctx context.Context, req *pb.DiffRequest) (*pb.DiffResponse, error) {
	out := new(pb.DiffResponse)
	return out, s.runPast(ctx, func(c *executor) (ackWait, error) {
		o, hash, err := s.diffOptions(ctx, c.session, req)
		if err != nil {
			return ackWait{}, err
		}
		d, err := c.session.Diff(ctx, o)
		if err != nil {
			return ackWait{}, err
		}
		out.FromEpoch, out.ToEpoch = uint64(o.From), uint64(d.To)
		for i := range d.Changes {
			change := &d.Changes[i]
			out.Changes = append(out.Changes, &pb.KeyChange{Key: change.Key, Old: stateMessage(&change.Old), New: stateMessage(&change.New)})
		}
		if d.More {
			out.ResumeToken = s.appendPastToken(pastToken{from: o.From, to: d.To, key: d.Last}, hash)
		}
		return ackRead(d.Await), c.checkAgain()
	})
}

func stateMessage(k *mvcc.KeyState) *pb.KeyState {
	if k.Deleted {
		return nil
	}
	return &pb.KeyState{Epoch: uint64(k.Epoch), Value: k.Value, ExpiresAtMs: k.Metadata.ExpiresAt}
}

func (s *feedService) diffOptions(ctx context.Context, x *mvcc.Session, req *pb.DiffRequest) (*mvcc.DiffOptions, uint32, error) {
	b, err := toBounds(req.GetRange())
	if err != nil {
		return nil, 0, err
	}
	if req.GetFromEpoch() == 0 && req.GetFromTimeUs() == 0 {
		return nil, 0, invalid("from_epoch", "or from_time_us must be set")
	}
	o := &mvcc.DiffOptions{
		Lower: b.lower, Upper: b.upper, Values: !req.GetKeysOnly(), Keys: diffKeysMax,
		Count: historyCount(req.GetLimit()), Bytes: historyBytesMax, Keep: s.config.SnapshotLeaseTTL, Client: networkOf(ctx),
	}
	p, hash, err := s.pastOf(ctx, x, req, b, diffToken)
	o.From, o.To, o.After = p.from, p.to, p.key
	return o, hash, err
}

// pastToken is the last key of a token of History or Diff: between which epochs, and where the answer ended. The epochs of
// times are in it, because a time may name another epoch when the log does not have its commits any more.
//
//	0      8       n-8
//	+------+-----+-------+
//	| from | key | epoch |
//	+------+-----+-------+
type pastToken struct {
	from, to keys.Epoch
	key      []byte
	epoch    keys.Epoch // of the last version of key; zero in tokens of Diff
}

const (
	pastTokenMin = 16

	historyToken, diffToken = 1, 2 // in the hash of the request
)

func (s *feedService) appendPastToken(p pastToken, hash uint32) []byte {
	last := binary.BigEndian.AppendUint64(nil, uint64(p.from))
	last = binary.BigEndian.AppendUint64(append(last, p.key...), uint64(p.epoch))
	return appendToken(nil, token{epoch: p.to, last: last, bounds: hash, store: s.storeID})
}

func (s *feedService) readPastToken(src []byte, hash uint32) (p pastToken, err error) {
	// Keys in quarantine may be longer than the limit of keys, so the limit is not checked here.
	t, err := decodeToken(src, s.storeID, max(s.limits.KeyBytes, s.limits.BatchBytes)+pastTokenMin)
	switch {
	case err != nil:
		return p, err
	case t.bounds != hash || len(t.last) <= pastTokenMin || t.reverse:
		return p, invalidToken("belongs to another request")
	}
	cut := len(t.last) - 8
	p = pastToken{from: keys.Epoch(binary.BigEndian.Uint64(t.last)), to: t.epoch, key: t.last[8:cut], epoch: keys.Epoch(binary.BigEndian.Uint64(t.last[cut:]))}
	if p.from > p.to || p.epoch > p.to {
		return p, invalidToken("is damaged")
	}
	return p, nil
}

// hashPast distinguishes requests, so that a token is only valid for its own.
func hashPast(b bounds, fields ...uint64) uint32 {
	h := hashBounds(b)
	for _, f := range fields {
		h = crc32.Update(h, castagnoli, binary.LittleEndian.AppendUint64(nil, f))
	}
	return h
}
