package main

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/encoding/protowire"
)

// A snapshot of etcd, as "etcdctl snapshot save" writes it, is a bbolt file with its SHA-256 after it. The bucket "key" has one entry for
// each revision that was not compacted: the key is the revision, of 8 bytes for the transaction, "_" and 8 bytes for the place within it,
// both most significant first, with a "t" after it if the revision deletes; the value is a protobuf message with the key and what it was set to.
// https://etcd.io/docs/v3.6/learning/data_model/, message mvccpb.KeyValue in etcd's api/mvccpb/kv.proto.
const (
	etcdBucket        = "key"
	etcdRevisionBytes = 8 + 1 + 8
	etcdTombstone     = 't'

	etcdFieldKey   = 1
	etcdFieldValue = 5
	etcdFieldLease = 6
)

// etcdSource reads the keys of a snapshot of etcd with their newest values, in the order of their revisions. It keeps all keys in memory,
// as etcd does itself.
type etcdSource struct {
	file    *bolt.DB
	advance func(bytes int)
	newest  map[string][etcdRevisionBytes]byte // of each key that exists
	pull    func() (record, error, bool)
	stop    func()
	count   int
}

func openEtcdSnapshot(name string, advance func(bytes int)) (*etcdSource, error) {
	if err := checkEtcdHash(name); err != nil {
		return nil, err
	}
	file, err := bolt.Open(name, 0, &bolt.Options{ReadOnly: true, Timeout: time.Second})
	if err != nil {
		return nil, fmt.Errorf("%s is not a snapshot of etcd: %w", name, err)
	}
	s := &etcdSource{file: file, advance: advance, newest: map[string][etcdRevisionBytes]byte{}}
	s.pull, s.stop = iter.Pull2(s.records)
	return s, nil
}

// checkEtcdHash compares the file with the SHA-256 at its end. The file of a running member has none, and is not consistent in itself.
func checkEtcdHash(name string) error {
	const alignment = 512 // of a bbolt file, so that etcd's own tools find the checksum in the same way
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it is only read
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.Size()%alignment != sha256.Size {
		return fmt.Errorf("%s has no checksum at its end, so it is not a complete snapshot of etcd; take one with: etcdctl snapshot save FILE", name)
	}
	hash := sha256.New()
	if _, err := io.CopyN(hash, file, info.Size()-sha256.Size); err != nil {
		return err
	}
	sum, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	if !bytes.Equal(sum, hash.Sum(nil)) {
		return fmt.Errorf("%s differs from the checksum at its end: the snapshot is damaged; copy it again or take another", name)
	}
	return nil
}

func (s *etcdSource) next() (record, int, error) {
	r, err, ok := s.pull()
	if !ok {
		return record{}, s.count, io.EOF
	}
	s.count++
	return r, s.count, err
}

func (s *etcdSource) close() {
	s.stop()
	_ = s.file.Close() // it was only read
}

// records finds the newest revision of each key, and then reads those.
func (s *etcdSource) records(yield func(record, error) bool) {
	err := s.file.View(func(tx *bolt.Tx) error {
		revisions := tx.Bucket([]byte(etcdBucket))
		if revisions == nil {
			return errors.New("the file has no keys of etcd 3 or newer")
		}
		if err := revisions.ForEach(s.index); err != nil {
			return err
		}
		for revision, message := range puts(revisions) {
			s.advance(len(revision) + len(message))
			r, err := decodeEtcd(message)
			if err != nil {
				return err
			}
			if s.newest[string(r.key)] != [etcdRevisionBytes]byte(revision) {
				continue
			}
			r.key, r.value = bytes.Clone(r.key), bytes.Clone(r.value) // the file is unmapped before the last batch is sent
			if !yield(r, nil) {
				return nil
			}
		}
		return nil
	})
	if err != nil {
		yield(record{}, err)
	}
}

// index notes a revision as the newest of its key; it is called in the order of revisions.
func (s *etcdSource) index(revision, message []byte) error {
	deletes := len(revision) == etcdRevisionBytes+1 && revision[etcdRevisionBytes] == etcdTombstone
	if len(revision) != etcdRevisionBytes && !deletes {
		return fmt.Errorf("a revision of etcd has an unknown form: %x", revision)
	}
	r, err := decodeEtcd(message)
	switch {
	case err != nil:
		return err
	case deletes:
		delete(s.newest, string(r.key))
	default:
		s.newest[string(r.key)] = [etcdRevisionBytes]byte(revision)
	}
	return nil
}

// puts walks the revisions that set a key, in their order.
func puts(bucket *bolt.Bucket) iter.Seq2[[]byte, []byte] {
	return func(yield func(revision, value []byte) bool) {
		cursor := bucket.Cursor()
		for revision, value := cursor.First(); revision != nil; revision, value = cursor.Next() {
			if len(revision) == etcdRevisionBytes && !yield(revision, value) {
				return
			}
		}
	}
}

// decodeEtcd reads a revision's message. Key and value are parts of the message.
func decodeEtcd(message []byte) (r record, err error) {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return r, fmt.Errorf("a revision of etcd cannot be decoded: %w", protowire.ParseError(n))
		}
		field := message[n:]
		if n = protowire.ConsumeFieldValue(number, kind, field); n < 0 {
			return r, fmt.Errorf("a revision of etcd cannot be decoded: %w", protowire.ParseError(n))
		}
		message = field[n:]
		switch {
		case number == etcdFieldKey && kind == protowire.BytesType:
			r.key, _ = protowire.ConsumeBytes(field)
		case number == etcdFieldValue && kind == protowire.BytesType:
			r.value, _ = protowire.ConsumeBytes(field)
		case number == etcdFieldLease && kind == protowire.VarintType:
			r.lease, _ = protowire.ConsumeVarint(field)
		}
	}
	if len(r.key) == 0 {
		return r, errors.New("a revision of etcd has no key")
	}
	return r, nil
}
