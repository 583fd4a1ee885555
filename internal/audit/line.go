package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"time"
	"unicode/utf8"
)

// Class groups requests.
type Class string

// Classes. Lines of auth, admin and denied are always written.
const (
	ClassAuth   Class = "auth"
	ClassAdmin  Class = "admin"
	ClassDenied Class = "denied"
	ClassWrite  Class = "write"
	ClassRead   Class = "read"
)

// Keys says how lines name keys.
type Keys string

// The ways.
const (
	KeysHash  Keys = "hash"
	KeysWhole Keys = "whole"
	KeysNone  Keys = "none"
)

// Range is keys that a request reads or writes; with Single the key Lower alone. An empty Upper is no bound.
type Range struct {
	Lower, Upper []byte
	Single       bool
}

// Event is what a line says of a request.
type Event struct {
	Time   time.Time
	Class  Class
	User   string
	Peer   string
	Method string

	Subject string   // the user or role that it is about
	Reads   []string // see Keys.Name
	Writes  []string
	More    int    // ranges that are not in Reads and Writes
	Code    string // of the status; Unknown if it is not known whether the request was executed
	Epoch   uint64 // of the commit; 0: none, or not known
	Took    time.Duration

	UnknownClient bool // the client is not known, and has got nothing: see unknownMax
}

// RangesMax bounds the ranges that a line names: more would let one request fill the queue.
const RangesMax = 32

// keyBytesMax bounds what a line has of a key.
const keyBytesMax = 256

// Name is how lines name a range; empty if they name none.
func (k Keys) Name(r *Range) string {
	if k == KeysNone {
		return ""
	}
	if r.Single {
		return k.key(r.Lower)
	}
	name := k.key(r.Lower) + ".."
	if len(r.Upper) > 0 {
		name += k.key(r.Upper)
	}
	return name
}

// key is the key itself, or two hashes: of its prefix up to the first slash, and of the whole key. So lines of one prefix
// can be found without the keys.
func (k Keys) key(key []byte) string {
	if k == KeysWhole {
		key = key[:min(len(key), keyBytesMax)]
		if utf8.Valid(key) {
			return string(key)
		}
		return "base16:" + hex.EncodeToString(key)
	}
	prefix := key
	for i, c := range key {
		if c == '/' {
			prefix = key[:i+1]
			break
		}
	}
	return shortHash(prefix) + "/" + shortHash(key)
}

func shortHash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// restBytes is more than a line takes beside the texts that clients choose, with its number and its hash.
const restBytes = 640

// BytesMax is what the line takes at most once the rest of it is known.
func (e *Event) BytesMax(keys Keys) int {
	texts := Event{User: e.User, Subject: e.Subject, Reads: e.Reads, Writes: e.Writes}
	return restBytes + len(texts.append(nil, keys))
}

// append appends the line without the brace that opens it, its number and its hash: the writer puts them before it.
func (e *Event) append(b []byte, keys Keys) []byte {
	b = append(b, `"time":"`...)
	b = e.Time.UTC().AppendFormat(b, time.RFC3339Nano)
	b = append(b, '"')
	b = appendText(b, "class", string(e.Class))
	b = appendText(b, "user", e.User)
	b = appendText(b, "peer", e.Peer)
	b = appendText(b, "method", e.Method)
	if e.Subject != "" {
		b = appendText(b, "subject", e.Subject)
	}
	if keys != KeysNone {
		b = appendList(b, "reads", e.Reads)
		b = appendList(b, "writes", e.Writes)
	}
	if e.More > 0 {
		b = appendNumber(b, "more_ranges", uint64(e.More))
	}
	b = appendText(b, "code", e.Code)
	if e.Epoch > 0 {
		b = appendNumber(b, "epoch", e.Epoch)
	}
	b = appendNumber(b, "took_us", uint64(max(0, e.Took.Microseconds())))
	return append(b, "}\n"...)
}

func appendText(b []byte, name, text string) []byte {
	quoted, _ := json.Marshal(text) // of a string
	b = append(append(b, `,"`...), name...)
	return append(append(b, `":`...), quoted...)
}

func appendNumber(b []byte, name string, n uint64) []byte {
	b = append(append(b, `,"`...), name...)
	return strconv.AppendUint(append(b, `":`...), n, 10)
}

func appendList(b []byte, name string, list []string) []byte {
	if len(list) == 0 {
		return b
	}
	quoted, _ := json.Marshal(list) // of strings
	b = append(append(b, `,"`...), name...)
	return append(append(b, `":`...), quoted...)
}
