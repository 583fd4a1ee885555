package archive

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// runWriter makes the run objects of a bulk load, one after the other.
type runWriter struct {
	frameWriter
	lineage keys.Lineage
	epoch   keys.Epoch
	load    Load
	sum     hash.Hash
	builder batch.Builder
	bytes   int // of the entries in builder
	entry   []byte
}

func newRunWriter(lineage keys.Lineage, epoch keys.Epoch, at uint64) *runWriter {
	return &runWriter{frameWriter: newFrameWriter(), lineage: lineage, epoch: epoch, load: Load{Time: at}, sum: sha256.New()}
}

// begin begins an object, which is needed before the first entry.
func (w *runWriter) begin() {
	w.reset()
	w.out = appendRunHeader(w.out, w.lineage, w.epoch, len(w.load.Objects))
}

// append adds an entry, whose key is above those before it.
func (w *runWriter) append(key, value []byte) error {
	w.entry = appendEntry(w.entry[:0], key, len(value))
	w.sum.Write(w.entry) // never fails
	w.sum.Write(value)
	w.builder.Set(keys.SpaceUser, key, value)
	w.load.Keys++
	w.load.Bytes += uint64(len(key) + len(value))
	if w.bytes += len(key) + len(value); w.bytes < runBodyBytes {
		return nil
	}
	return w.endBody()
}

// appendEntry appends what the sum has of an entry before the value.
func appendEntry(dst, key []byte, valueBytes int) []byte {
	dst = append(binary.AppendUvarint(dst, uint64(len(key))), key...)
	return binary.AppendUvarint(dst, uint64(valueBytes))
}

func (w *runWriter) endBody() error {
	if w.builder.Count() == 0 {
		return nil
	}
	w.builder.SetHeader(batch.Header{Time: w.load.Time})
	body, err := w.builder.Finish()
	if err != nil {
		return err
	}
	encoded := body.Bytes()
	w.add(binary.AppendUvarint(nil, uint64(len(encoded))))
	w.add(encoded)
	w.builder.Reset()
	w.bytes = 0
	return nil
}

// object ends the object, which has entries, and returns it. Its bytes are valid until begin.
func (w *runWriter) object() (RunObject, []byte, error) {
	if err := w.endBody(); err != nil {
		return RunObject{}, nil, err
	}
	w.end()
	return RunObject{sha256.Sum256(w.out), int64(len(w.out))}, w.out, nil
}

// size is about the size of the object so far.
func (w *runWriter) size() int64 { return w.Bytes() + int64(w.bytes) }

// empty reports whether the object has no entries.
func (w *runWriter) empty() bool { return w.rawBytes == 0 && w.builder.Count() == 0 }

// finish returns the description of the bulk load.
func (w *runWriter) finish() Load {
	w.sum.Sum(w.load.Sum[:0])
	return w.load
}
