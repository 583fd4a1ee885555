package epochkvv1

import (
	"encoding/binary"

	"google.golang.org/protobuf/types/known/timestamppb"
)

// A watch that catches up receives hundreds of thousands of commits a second, most of them with one event. Generated code allocates
// six pieces of memory for each. Here those of a response share them: the messages are elements of slices that are made once the
// commits have been counted. Key, value and previous value of an event have a piece of their own, so that a program that
// keeps a value does not keep the response with it.

// unmarshalResponse decodes a response of a watch as UnmarshalVT does. The message must be empty.
func (x *WatchResponse) unmarshalResponse(data []byte) error {
	if x.unmarshalChanges(data) {
		return nil
	}
	x.Reset()
	return x.UnmarshalVT(data)
}

// wireField is a field of a message as this file knows them: a number, or bytes.
type wireField struct {
	number int
	isData bool
	value  uint64
	data   []byte
}

// Wire types of protobuf.
const (
	wireVarint = 0
	wireBytes  = 2
)

// next reads the field at the begin of b, and returns what follows. It reports false for one that UnmarshalVT has to look at.
func (f *wireField) next(b []byte) (rest []byte, ok bool) {
	if b[0] >= 0x80 { // the fields of all messages here have numbers below 16
		return nil, false
	}
	f.number, f.isData = int(b[0]>>3), b[0]&7 == wireBytes
	if !f.isData && b[0]&7 != wireVarint || f.number == 0 {
		return nil, false
	}
	if b = b[1:]; len(b) > 0 && b[0] < 0x80 {
		f.value, b = uint64(b[0]), b[1:]
	} else {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			return nil, false
		}
		f.value, b = v, b[n:]
	}
	if f.isData {
		if f.value > uint64(len(b)) {
			return nil, false
		}
		f.data, b = b[:f.value], b[f.value:]
	}
	return b, true
}

// Numbers of the fields in feed.proto.
const (
	fieldWatchID, fieldChanges, fieldResumeToken = 1, 3, 8

	fieldCommits = 1

	fieldEpoch, fieldTime, fieldOrigin, fieldEvents, fieldEnd, fieldLagging = 1, 2, 3, 4, 5, 6

	fieldSeconds, fieldNanos = 1, 2

	fieldKind, fieldKey, fieldValue, fieldPrevious, fieldUnavailable, fieldLease, fieldExpires, fieldEndKey = 1, 2, 3, 4, 5, 6, 7, 8
)

// unmarshalChanges decodes a response with changes. It reports false if it is another one, or has something that is not known here;
// some of it may be in x then.
func (x *WatchResponse) unmarshalChanges(data []byte) (ok bool) {
	var f wireField
	for len(data) > 0 {
		if data, ok = f.next(data); !ok {
			return false
		}
		switch {
		case f.number == fieldWatchID && !f.isData:
			x.WatchId = f.value
		case f.number == fieldResumeToken && f.isData:
			x.ResumeToken = append(make([]byte, 0, len(f.data)), f.data...)
		case f.number == fieldChanges && f.isData && x.Body == nil:
			c := &WatchChanges{}
			x.Body = &WatchResponse_Changes{Changes: c}
			if !c.unmarshalShared(f.data) {
				return false
			}
		default:
			return false
		}
	}
	return x.Body != nil
}

// changesMemory is what the messages of a response share.
type changesMemory struct {
	left    int // commits without events so far
	commits []ChangedCommit
	times   []timestamppb.Timestamp
	events  []ChangeEvent
	refs    []*ChangeEvent
}

// event is a new event of a commit. Most commits have one.
func (m *changesMemory) event(list []*ChangeEvent) ([]*ChangeEvent, *ChangeEvent) {
	if len(m.events) == 0 {
		m.events = make([]ChangeEvent, max(m.left, 1))
	}
	if list == nil {
		list, m.refs = m.refs[:0:1], m.refs[1:]
	}
	e := &m.events[0]
	m.events = m.events[1:]
	return append(list, e), e
}

func (x *WatchChanges) unmarshalShared(data []byte) bool {
	n, ok := countCommits(data)
	if !ok {
		return false
	}
	m := changesMemory{left: n, commits: make([]ChangedCommit, n), times: make([]timestamppb.Timestamp, n), refs: make([]*ChangeEvent, n)}
	x.Commits = make([]*ChangedCommit, n)
	var f wireField
	for i := range x.Commits {
		data, _ = f.next(data)
		x.Commits[i] = &m.commits[i]
		if !x.Commits[i].unmarshalShared(f.data, &m.times[i], &m) {
			return false
		}
		m.left--
	}
	return true
}

func countCommits(data []byte) (n int, ok bool) {
	var f wireField
	for ; len(data) > 0; n++ {
		if data, ok = f.next(data); !ok || f.number != fieldCommits || !f.isData {
			return 0, false
		}
	}
	return n, true
}

func (x *ChangedCommit) unmarshalShared(data []byte, t *timestamppb.Timestamp, m *changesMemory) (ok bool) {
	var f wireField
	for len(data) > 0 {
		if data, ok = f.next(data); !ok {
			return false
		}
		switch {
		case f.number == fieldEvents && f.isData:
			var e *ChangeEvent
			if x.Events, e = m.event(x.Events); !e.unmarshalOwn(f.data) {
				return false
			}
		case f.number == fieldTime && f.isData && x.Time == nil:
			if x.Time = t; !unmarshalTime(f.data, t) {
				return false
			}
		case f.isData:
			return false
		case f.number == fieldEpoch:
			x.Epoch = f.value
		case f.number == fieldOrigin:
			x.Origin = CommitOrigin(int32(f.value))
		case f.number == fieldEnd:
			x.End = f.value != 0
		case f.number == fieldLagging:
			x.Lagging = f.value != 0
		default:
			return false
		}
	}
	return true
}

func unmarshalTime(data []byte, t *timestamppb.Timestamp) (ok bool) {
	var f wireField
	for len(data) > 0 {
		if data, ok = f.next(data); !ok || f.isData {
			return false
		}
		switch f.number {
		case fieldSeconds:
			t.Seconds = int64(f.value)
		case fieldNanos:
			t.Nanos = int32(f.value)
		default:
			return false
		}
	}
	return true
}

// unmarshalOwn copies keys and values into one piece of memory.
func (x *ChangeEvent) unmarshalOwn(data []byte) (ok bool) {
	var f wireField
	own := make([]byte, 0, len(data))
	for len(data) > 0 {
		if data, ok = f.next(data); !ok {
			return false
		}
		if !f.isData {
			if !x.setNumber(&f) {
				return false
			}
			continue
		}
		from := len(own)
		own = append(own, f.data...)
		if !x.setData(f.number, own[from:len(own):len(own)]) {
			return false
		}
	}
	return true
}

func (x *ChangeEvent) setNumber(f *wireField) bool {
	switch f.number {
	case fieldKind:
		x.Kind = EventKind(int32(f.value))
	case fieldUnavailable:
		x.PreviousUnavailable = f.value != 0
	case fieldLease:
		x.LeaseId = f.value
	case fieldExpires:
		x.ExpiresAtMs = int64(f.value)
	default:
		return false
	}
	return true
}

func (x *ChangeEvent) setData(number int, data []byte) bool {
	switch number {
	case fieldKey:
		x.Key = data
	case fieldValue:
		x.Value = data
	case fieldPrevious:
		x.PreviousValue = data
	case fieldEndKey:
		x.EndKey = data
	default:
		return false
	}
	return true
}
