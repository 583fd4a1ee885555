package repairtree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// The record of a skipped page. Its key is keyspace SpaceRepairTree and the page id, 8 bytes, big endian.
//
//	0       1            9              17             25      26          28          30           32
//	+-------+------------+--------------+--------------+-------+-----------+-----------+------------+-------+-------+--------+
//	| level | checkpoint | lower        | upper        | flags | lower key | upper key | reason     | lower | upper | reason |
//	|       |            | trailer      | trailer      |       | len       | len       | len        | key   | key   |        |
//	+-------+------------+--------------+--------------+-------+-----------+-----------+------------+-------+-------+--------+
//
// Flag 1: there is an upper bound. Without it upper key and trailer are zero.
const (
	recordCheckpoint = 1
	recordLower      = 9
	recordUpper      = 17
	recordFlags      = 25
	recordLowerLen   = 26
	recordUpperLen   = 28
	recordReasonLen  = 30
	recordKeys       = 32

	recordFlagUpper = 1

	// reasonMax bounds the reason: it is read by people.
	reasonMax = 200
)

var errPageRecord = errors.New("malformed record of a skipped page")

func pageRecordKey(id page.ID) []byte {
	return binary.BigEndian.AppendUint64([]byte{byte(keys.SpaceRepairTree)}, uint64(id))
}

func (p *Page) encode() []byte {
	b := make([]byte, recordKeys, recordKeys+len(p.Lower.Key)+len(p.Reason)+64)
	b[0] = byte(p.Level)
	binary.LittleEndian.PutUint64(b[recordCheckpoint:], p.Checkpoint)
	binary.LittleEndian.PutUint64(b[recordLower:], uint64(p.Lower.Trailer))
	binary.LittleEndian.PutUint16(b[recordLowerLen:], uint16(len(p.Lower.Key)))
	binary.LittleEndian.PutUint16(b[recordReasonLen:], uint16(len(p.Reason)))
	b = append(b, p.Lower.Key...)
	if p.Upper != nil {
		b[recordFlags] = recordFlagUpper
		binary.LittleEndian.PutUint64(b[recordUpper:], uint64(p.Upper.Trailer))
		binary.LittleEndian.PutUint16(b[recordUpperLen:], uint16(len(p.Upper.Key)))
		b = append(b, p.Upper.Key...)
	}
	return append(b, p.Reason...)
}

// decodePageRecord reads a record. The page keeps neither slice.
func decodePageRecord(key, value []byte) (Page, error) {
	if len(key) != 9 || keys.SpaceOf(key) != keys.SpaceRepairTree || len(value) < recordKeys {
		return Page{}, fmt.Errorf("%w: %d bytes under a key of %d", errPageRecord, len(value), len(key))
	}
	p := Page{
		ID: page.ID(binary.BigEndian.Uint64(key[1:])), Level: int(value[0]),
		Checkpoint: binary.LittleEndian.Uint64(value[recordCheckpoint:]),
		Lower:      page.Separator{Trailer: keys.Trailer(binary.LittleEndian.Uint64(value[recordLower:]))},
	}
	lower, upper := int(binary.LittleEndian.Uint16(value[recordLowerLen:])), int(binary.LittleEndian.Uint16(value[recordUpperLen:]))
	reason, flags := int(binary.LittleEndian.Uint16(value[recordReasonLen:])), value[recordFlags]
	rest := value[recordKeys:]
	if p.Level > page.LevelMax || flags&^recordFlagUpper != 0 || len(rest) != lower+upper+reason ||
		flags == 0 && (upper != 0 || binary.LittleEndian.Uint64(value[recordUpper:]) != 0) {
		return Page{}, fmt.Errorf("%w: level %d, flags %#x, %d+%d+%d bytes in %d", errPageRecord, p.Level, flags, lower, upper, reason, len(rest))
	}
	p.Lower.Key = bytes.Clone(rest[:lower])
	if flags&recordFlagUpper != 0 {
		p.Upper = &page.Separator{
			Key: bytes.Clone(rest[lower : lower+upper]), Trailer: keys.Trailer(binary.LittleEndian.Uint64(value[recordUpper:])),
		}
		if compareLower(p.Lower, *p.Upper) >= 0 {
			return Page{}, fmt.Errorf("%w: from %v to %v", errPageRecord, p.Lower, p.Upper)
		}
	}
	p.Reason = string(rest[lower+upper:])
	return p, nil
}
