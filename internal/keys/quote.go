package keys

import "strconv"

// quotedBytesMax is how much of a key is in a message for people. A key has up to some kilobytes, and four times as many
// when all its bytes are escaped.
const quotedBytesMax = 64

// Quote is a key as messages for people show it: a Go string literal, shortened if the key is long.
func Quote(key []byte) string {
	if len(key) <= quotedBytesMax {
		return strconv.Quote(string(key))
	}
	return strconv.Quote(string(key[:quotedBytesMax])) + "..."
}
