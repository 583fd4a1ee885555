package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
)

// TestAddressesOfRedis: user, password and database of an address are used, what is left out has its default, and nothing else is accepted.
func TestAddressesOfRedis(t *testing.T) {
	m := miniredis.RunT(t)
	m.RequireUserAuth("ann", "secret-word")
	m.RequireUserAuth("default", "other-word")
	_ = m.Set("zero", "0")
	_ = m.DB(7).Set("seven", "7")
	for _, c := range []struct{ user, path, environment, want string }{
		{"ann:secret-word@", "", "", "zero"},
		{"ann:secret-word@", "/", "", "zero"},
		{"ann:secret-word@", "/7", "other-word", "seven"},
		{"ann@", "/7", "secret-word", "seven"},
		{":other-word@", "", "", "zero"},
		{"", "/0", "other-word", "zero"},
		{"", "", "secret-word", "error: WRONGPASS"},
		{"ann:other-word@", "", "", "error: WRONGPASS"},
		{"", "", "", "error: NOAUTH"},
		{"ann:secret-word@", "/seven", "", "usage"},
		{"ann:secret-word@", "/-1", "", "usage"},
		{"ann:secret-word@", "?db=7", "", "usage"},
		{"ann:secret-word@", "#7", "", "usage"},
	} {
		t.Run(c.user+c.path, func(t *testing.T) {
			t.Setenv("REDISCLI_AUTH", c.environment)
			source, _, err := openRedis(t.Context(), "redis://"+c.user+m.Addr()+c.path, false, io.Discard)
			if err != nil {
				_, usage := errors.AsType[usageError](err)
				says, refused := strings.CutPrefix(c.want, "error: ")
				if usage != (c.want == "usage") || !usage && (!refused || !strings.Contains(err.Error(), says)) || strings.Contains(err.Error(), "-word") {
					t.Errorf("%v, want %s", err, c.want)
				}
				return
			}
			defer source.close()
			records, err := readAll(t, source)
			if _, found := records[c.want]; err != nil || !found || len(records) != 1 {
				t.Errorf("%v, %v, want %s", records, err, c.want)
			}
		})
	}
}

func TestRedisOverTLSMustBeTrusted(t *testing.T) {
	unknown := httptest.NewTLSServer(nil)
	defer unknown.Close()
	m, err := miniredis.RunTLS(&tls.Config{Certificates: unknown.TLS.Certificates, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	_, _, err = openRedis(t.Context(), "rediss://"+m.Addr(), false, io.Discard)
	if _, untrusted := errors.AsType[x509.UnknownAuthorityError](err); !untrusted {
		t.Errorf("%v, want that the certificate is not known", err)
	}
}

// TestAnAnswerOfRedisWithoutKeysIsNotTheLast: SCAN may return none, and a cursor.
func TestAnAnswerOfRedisWithoutKeysIsNotTheLast(t *testing.T) {
	m := miniredis.RunT(t)
	_ = m.Set("key", "v")
	m.Server().SetPreHook(func(peer *server.Peer, cmd string, args ...string) bool {
		if cmd == "SCAN" && args[0] == "0" {
			peer.WriteLen(2)
			peer.WriteBulk("18446744073709551615")
			peer.WriteLen(0)
			return true
		}
		if cmd == "SCAN" && args[0] == "18446744073709551615" {
			peer.WriteLen(2)
			peer.WriteBulk("0")
			peer.WriteStrings([]string{"key", "deleted"})
			return true
		}
		return false
	})
	source, _, err := openRedis(t.Context(), "redis://"+m.Addr(), false, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer source.close()
	records, err := readAll(t, source)
	if _, found := records["key"]; err != nil || !found {
		t.Errorf("%v, %v, want the key of the second answer", records, err)
	}
}
