package users

import (
	"bytes"
	"encoding/hex"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
)

// records are one of each kind, and their bytes: docs/formats.md describes them. The bytes change only with a new feature level.
var records = []struct {
	name, bytes string
	encode      func() []byte
	again       func([]byte) ([]byte, error)
}{
	{"settings", "01000000", func() []byte { return encodeSettings(true) }, againSettings},
	{
		"user", "01000000" + "e803000000000000" + "01000000" + "02000000" + "03000000" + "04000000" + "0500000000000000" + "0600000000000000" +
			"0500" + "2468617368" + "0200" + "016d" + "04726f6f74",
		func() []byte {
			return (&User{
				Disabled: true, Created: time.UnixMilli(1000), Roles: []string{"m", "root"}, hash: "$hash",
				Limits: auth.Limits{Requests: 1, Streams: 2, Watches: 3, Transactions: 4, BytesIn: 5, BytesOut: 6},
			}).encode()
		}, againUser,
	},
	{
		"role", "1f000000" + "0200" + "03" + "0100" + "61" + "0200" + "6262" + "04" + "0000" + "0000",
		func() []byte {
			return (&Role{Actions: auth.ActionsAll, Grants: []auth.Grant{{Lower: []byte("a"), Upper: []byte("bb"), Read: true, Write: true}, {Lease: true}}}).encode()
		}, againRole,
	},
	{
		"token", "01000000" + "e803000000000000" + "d007000000000000" + "b80b000000000000" + "03" + "616e6e" + "6c6162656c",
		func() []byte {
			return (&token{
				live: &auth.Token{User: "ann", Expires: time.UnixMilli(2000)}, session: true, created: time.UnixMilli(1000), lastUsed: time.UnixMilli(3000), label: "label",
			}).encode()
		}, againToken,
	},
}

func againSettings(v []byte) ([]byte, error) {
	enabled, err := decodeSettings(v)
	return encodeSettings(enabled), err
}

func againUser(v []byte) ([]byte, error) {
	u, err := decodeUser(v)
	return u.encode(), err
}

func againRole(v []byte) ([]byte, error) {
	r, err := decodeRole(v)
	return r.encode(), err
}

func againToken(v []byte) ([]byte, error) {
	k, err := decodeToken(v)
	return k.encode(), err
}

func TestRecordsKeepTheirBytes(t *testing.T) {
	for _, r := range records {
		want, err := hex.DecodeString(r.bytes)
		must(t, err)
		if got := r.encode(); !bytes.Equal(got, want) {
			t.Errorf("%s is %x, want %x", r.name, got, want)
		}
		if got, err := r.again(want); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is read as %x, %v", r.name, got, err)
		}
		for n := range want { // a part of a record is none, but for the label, which may be empty
			if _, err := r.again(want[:n]); err == nil && r.name != "token" {
				t.Errorf("%d bytes of a %s are accepted", n, r.name)
			}
		}
	}
}

// FuzzRecords: whatever is accepted is encoded as it was.
func FuzzRecords(f *testing.F) {
	for i, r := range records {
		f.Add(uint8(i), r.encode())
	}
	f.Fuzz(func(t *testing.T, kind uint8, value []byte) {
		got, err := records[int(kind)%len(records)].again(value)
		if err == nil && !bytes.Equal(got, value) {
			t.Errorf("%x is read as %x", value, got)
		}
	})
}
