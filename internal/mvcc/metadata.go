package mvcc

import (
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
)

// A version may have metadata beside its value: its deadline and its lease (package metadata). Every write replaces the
// whole version: a write without metadata removes what the version before had. Only operations of Invoke that compute the
// new value from the old one keep it.
//
// Metadata is written at keys.FeatureLevelHistory and above: older programs refuse such versions.

// Metadata is what a version says beside its value.
type Metadata = metadata.Fields

// FeatureLevelError means that the store must not be written in a format that its feature level does not have.
type FeatureLevelError struct {
	What         string // that needs the level
	Needs, Level keys.FeatureLevel
}

func (e *FeatureLevelError) Error() string {
	return fmt.Sprintf("mvcc: %s need feature level %d, and the store is at %d; raise it with kvctl upgrade finalize", e.What, e.Needs, e.Level)
}

// RequireFeatureLevel is *FeatureLevelError if the store is below the level. What is a noun in the plural.
func (s *Store) RequireFeatureLevel(level keys.FeatureLevel, what string) error {
	if is := s.FeatureLevel(); is < level {
		return &FeatureLevelError{What: what, Needs: level, Level: is}
	}
	return nil
}

// checkMetadata checks what a key must fulfil so that a version of it may have metadata. Its record in the expiry queue, or
// of its attachment to a lease, has a longer key, which the tree must take, too.
func (s *Store) checkMetadata(key []byte) error {
	if err := s.RequireFeatureLevel(keys.FeatureLevelHistory, "deadlines and leases of keys"); err != nil {
		return err
	}
	if limit := storage.KeyBytesMax(s.options.Storage.PageSize) - keys.OwnedBytes; len(key) > limit {
		return &LimitError{What: "key bytes with metadata", Limit: limit, Got: len(key)}
	}
	return nil
}

// SetWithMetadata is SetShared of a value with metadata, which is not nil.
func (w *Write) SetWithMetadata(key, value []byte, f *metadata.Fields) {
	if *f == (metadata.Fields{}) {
		w.SetShared(key, value)
		return
	}
	w.Batch.SetMetadataShared(keys.SpaceUser, key, f, value)
}

// Metadata is the metadata of the version that the last Read of the session found. In a function that ReadAll calls, it is
// that of the version which is visited.
func (x *Session) Metadata() (metadata.Fields, error) {
	if len(x.section) == 0 {
		return metadata.Fields{}, nil
	}
	return metadata.Read(keys.KindSetMetadata, x.section)
}

// keepSection remembers the metadata of the version that is read.
func (x *Session) keepSection(section []byte) {
	if len(section) > 0 {
		x.section = append(x.section[:0], section...)
	}
}

// Metadata is the metadata of the current entry.
func (c *Cursor) Metadata() (metadata.Fields, error) { return c.inner.Version().Metadata() }

// SetWithMetadata is Set of a value with metadata, which is not nil.
func (t *Txn) SetWithMetadata(key, value []byte, f *metadata.Fields) error {
	return t.setWithMetadata(key, value, f, false)
}

// setWithMetadata does not copy a large value that is alone: nothing changes it before the transaction has ended.
func (t *Txn) setWithMetadata(key, value []byte, f *metadata.Fields, alone bool) error {
	if err := t.checkValue(value); err != nil {
		return err
	}
	if *f == (metadata.Fields{}) {
		return t.put(key, nil, value, keys.KindSet, alone)
	}
	if t.open {
		if err := t.session.store.checkMetadata(key); err != nil {
			return err
		}
	}
	var room [metadata.SectionBytesMax]byte
	return t.put(key, f.Append(room[:0]), value, keys.KindSetMetadata, alone)
}

// Metadata is the metadata of what the last Get found: a version, or the transaction's own write.
func (t *Txn) Metadata() (metadata.Fields, error) { return t.session.Metadata() }

// Metadata is the metadata of the current entry.
func (c *TxnCursor) Metadata() (metadata.Fields, error) {
	if c.onOwn {
		e := c.entry(c.at - 1)
		return metadata.Read(e.kind, c.txn.own.bytes(e.value))
	}
	return c.base.Metadata()
}
