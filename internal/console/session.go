package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// cookie has the token of a browser. Scripts cannot read it, and no other site can make a browser send it.
const cookie = "epochkv-console"

// sessionTime is how long a login lasts.
const sessionTime = 12 * time.Hour

// Authorization is the header "authorization" that a call on behalf of the caller of r has: its own, or that of its login.
func Authorization(r *http.Request) string {
	if h := r.Header.Get("Authorization"); h != "" {
		return h
	}
	if c, err := r.Cookie(cookie); err == nil && c.Value != "" {
		return "Bearer " + c.Value
	}
	return ""
}

func (e *CallError) json() []byte {
	text, err := json.Marshal(e)
	if err != nil {
		panic(err) // strings can be marshalled
	}
	return text
}

// about tells a page what the console can do, before a login.
func (c *console) about(w http.ResponseWriter, r *http.Request) error {
	text, err := json.Marshal(map[string]bool{
		"users": c.Checked(), "changes": c.Changes, "login": Authorization(r) != "",
	})
	if err != nil {
		return err
	}
	return answerJSON(w, text)
}

// login exchanges a user's password, or a token that exists, for a cookie.
func (c *console) login(w http.ResponseWriter, r *http.Request) error {
	var in struct{ User, Password, Token string }
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, messageBytesMax)).Decode(&in); err != nil {
		return &CallError{Status: http.StatusBadRequest, Code: "InvalidArgument", Message: "expected user and password, or token"}
	}
	expires := time.Now().Add(sessionTime)
	if in.Token == "" {
		token, err := c.tokenFor(r, in.User, in.Password)
		if err != nil {
			return err
		}
		in.Token = token
	} else {
		known := r.Clone(r.Context())
		known.Header.Set("Authorization", "Bearer "+in.Token)
		answer, err := c.Call(known, "epochkv.v1.AuthService/WhoAmI", []byte("{}"))
		if err != nil {
			return err
		}
		var who struct{ User string }
		if err := json.Unmarshal(answer, &who); err != nil || who.User == "" {
			return &CallError{Status: http.StatusUnauthorized, Code: "Unauthenticated", Message: "the token is not known, or has expired"}
		}
	}
	setCookie(w, r, in.Token, expires)
	return answerJSON(w, []byte("{}"))
}

func (c *console) tokenFor(r *http.Request, user, password string) (string, error) {
	message, err := json.Marshal(map[string]string{
		"user": user, "password": password, "label": "console", "lifetime": fmt.Sprintf("%.0fs", sessionTime.Seconds()),
	})
	if err != nil {
		return "", err
	}
	answer, err := c.Call(r, "epochkv.v1.AuthService/Login", message)
	if err != nil {
		return "", err
	}
	var out struct{ Token string }
	err = json.Unmarshal(answer, &out)
	return out.Token, err
}

// logout revokes the token and forgets it. A cookie whose token has expired is forgotten as well.
func (c *console) logout(w http.ResponseWriter, r *http.Request) error {
	_, err := c.Call(r, "epochkv.v1.AuthService/Logout", []byte("{}"))
	setCookie(w, r, "", time.Unix(1, 0))
	if e := (*CallError)(nil); err != nil && errors.As(err, &e) && e.Status == http.StatusUnauthorized {
		err = nil
	}
	if err != nil {
		return err
	}
	return answerJSON(w, []byte("{}"))
}

func setCookie(w http.ResponseWriter, r *http.Request, token string, expires time.Time) {
	http.SetCookie(w, &http.Cookie{
		Name: cookie, Value: token, Path: Root, Expires: expires,
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil,
	})
}
