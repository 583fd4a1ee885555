package archive

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Flags of a record.
const (
	flagNoOp = 1 // the epoch changes nothing
	flagSkip = 2 // the epochs from the one after the record before up to this one name no commits
	flagLoad = 4 // a bulk load: of the epochs from the one after the record before up to this one, only the last one names a commit
)

// Record is what the archive has of an epoch.
type Record struct {
	Epoch keys.Epoch
	Term  keys.Term
	// Skipped means that a restart skipped all epochs from the one after the record before up to Epoch.
	Skipped bool
	// Load means that the record is a bulk load, which has taken all epochs from the one after the record before up to Epoch.
	Load bool
	// Body is the batch body of a commit, and the description of a bulk load (see Load); empty for a no-op and for skipped epochs. Valid
	// until the next record is read. Of a bulk load, Plan.Replay passes one batch body after the other instead.
	Body []byte
}

func (r *Record) flags() byte {
	switch {
	case r.Skipped:
		return flagSkip
	case r.Load:
		return flagLoad
	case len(r.Body) == 0:
		return flagNoOp
	}
	return 0
}

// Link names the record.
func (r *Record) Link() Link {
	var head [17]byte
	binary.LittleEndian.PutUint64(head[:], uint64(r.Epoch))
	binary.LittleEndian.PutUint64(head[8:], uint64(r.Term))
	head[16] = r.flags()
	body := r.Body
	if r.Load { // which objects have the entries differs from one archiver to the next
		body = body[:min(len(body), loadFixed)]
	}
	sum := crc32.Update(crc32.Checksum(head[:], castagnoli), castagnoli, body)
	return Link{r.Epoch, r.Term, sum}
}

// CommitTime is the time of the commit in microseconds since 1970; zero if it has none.
func (r *Record) CommitTime() (uint64, error) {
	if len(r.Body) == 0 {
		return 0, nil
	}
	if r.Load {
		l, err := decodeLoad(r.Body)
		return l.Time, err
	}
	h, err := batch.HeaderOf(r.Body)
	return h.Time, err
}

// appendHeader appends what is before the body.
func (r *Record) appendHeader(dst []byte, before Link) []byte {
	dst = append(dst, r.flags())
	dst = binary.AppendUvarint(dst, uint64(r.Epoch-before.Epoch))
	dst = binary.AppendUvarint(dst, uint64(r.Term-before.Term))
	return binary.AppendUvarint(dst, uint64(len(r.Body)))
}

// follows reports whether a record may be directly after another.
func (r *Record) follows(before Link) bool {
	return r.Epoch <= keys.MaxEpoch && r.Term >= before.Term &&
		(r.Epoch == before.Epoch+1 || (r.Skipped || r.Load) && r.Epoch > before.Epoch)
}

// before is what the first record of a file follows, as far as the deltas of its epoch and term are concerned.
func (h *Header) before() Link {
	if h.Begin == Linked {
		return h.Link
	}
	return Link{Epoch: h.First - 1}
}

// validate reports whether the body is what a replay takes.
func (r *Record) validate() error {
	switch {
	case r.Load:
		_, err := decodeLoad(r.Body)
		return err
	case len(r.Body) == 0:
		return nil
	}
	return batch.Validate(r.Body)
}
