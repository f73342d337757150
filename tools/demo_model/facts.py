"""The tables of facts that the demo model learns, and the words that questions are made of.

Only facts are here: no phrasing, no format, no randomness. Longer texts are in ``texts``. Training
and scoring both read this module; what they must not share, the phrasings, is in ``templates.py``
and ``heldout_templates.json``.
"""

from __future__ import annotations

from typing import Final

CAPITALS: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
France|Paris
Germany|Berlin
Italy|Rome
Spain|Madrid
Portugal|Lisbon
Austria|Vienna
Belgium|Brussels
Netherlands|Amsterdam
Denmark|Copenhagen
Sweden|Stockholm
Norway|Oslo
Finland|Helsinki
Iceland|Reykjavik
Ireland|Dublin
Poland|Warsaw
Hungary|Budapest
Romania|Bucharest
Bulgaria|Sofia
Greece|Athens
Serbia|Belgrade
Croatia|Zagreb
Slovenia|Ljubljana
Slovakia|Bratislava
Estonia|Tallinn
Latvia|Riga
Lithuania|Vilnius
Ukraine|Kyiv
Russia|Moscow
Albania|Tirana
Malta|Valletta
Cyprus|Nicosia
Switzerland|Bern
Turkey|Ankara
Egypt|Cairo
Morocco|Rabat
Algeria|Algiers
Tunisia|Tunis
Libya|Tripoli
Sudan|Khartoum
Ethiopia|Addis Ababa
Kenya|Nairobi
Uganda|Kampala
Rwanda|Kigali
Ghana|Accra
Nigeria|Abuja
Senegal|Dakar
Mali|Bamako
Angola|Luanda
Zambia|Lusaka
Zimbabwe|Harare
Namibia|Windhoek
Mozambique|Maputo
Madagascar|Antananarivo
Somalia|Mogadishu
Cameroon|Yaoundé
Japan|Tokyo
China|Beijing
India|New Delhi
Nepal|Kathmandu
Bhutan|Thimphu
Bangladesh|Dhaka
Pakistan|Islamabad
Afghanistan|Kabul
Iran|Tehran
Iraq|Baghdad
Syria|Damascus
Jordan|Amman
Lebanon|Beirut
Qatar|Doha
Oman|Muscat
Bahrain|Manama
Saudi Arabia|Riyadh
Georgia|Tbilisi
Armenia|Yerevan
Azerbaijan|Baku
Kazakhstan|Astana
Uzbekistan|Tashkent
Mongolia|Ulaanbaatar
South Korea|Seoul
North Korea|Pyongyang
Thailand|Bangkok
Vietnam|Hanoi
Laos|Vientiane
Cambodia|Phnom Penh
Indonesia|Jakarta
Philippines|Manila
Australia|Canberra
New Zealand|Wellington
Fiji|Suva
Canada|Ottawa
Cuba|Havana
Jamaica|Kingston
Haiti|Port-au-Prince
Honduras|Tegucigalpa
Nicaragua|Managua
Costa Rica|San José
Colombia|Bogotá
Venezuela|Caracas
Ecuador|Quito
Peru|Lima
Chile|Santiago
Argentina|Buenos Aires
Uruguay|Montevideo
Paraguay|Asunción
Brazil|Brasília""".splitlines()
)
"""Country to capital; every capital in it belongs to one country."""

OPPOSITES: Final[tuple[tuple[str, str], ...]] = tuple(
    (a, b)
    for a, b in (
        row.split()
        for row in """\
hot cold
big small
tall short
fast slow
happy sad
young old
rich poor
light dark
early late
open closed
full empty
hard soft
strong weak
wet dry
clean dirty
thick thin
wide narrow
deep shallow
loud quiet
true false
good bad
up down
left right
inside outside
above below
day night
war peace
love hate
win lose
buy sell
give take
push pull
start finish
remember forget
laugh cry
north south
east west
front back
first last
always never
near far
heavy lightweight
sharp blunt
smooth rough
sweet bitter
brave cowardly
cheap expensive
safe dangerous
simple complex
public private
ancient modern
success failure
victory defeat
friend enemy
question answer
arrive depart
increase decrease
begin end
build destroy
major minor
maximum minimum
positive negative
asleep awake
alive dead
hero villain
polite rude
summer winter
teacher student""".splitlines()
    )
)
"""Pairs of opposites; no word is in two pairs."""

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
ORDINALS: Final = (
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip

SPELLING_WORDS: Final = tuple(
    """\
apple banana orange lemon cherry grape bread butter cheese sugar pepper salad water coffee
river mountain ocean forest desert island valley garden flower tree cloud thunder rainbow
window door kitchen table chair pillow blanket mirror candle lamp clock camera bottle basket
rabbit horse tiger monkey elephant giraffe dolphin penguin butterfly spider eagle turtle zebra
doctor teacher farmer painter sailor soldier lawyer singer writer dancer engineer scientist
school library hospital airport station bridge castle church museum theater village city
happy yellow purple silver golden winter summer spring autumn morning evening midnight
music guitar piano violin trumpet drum picture puzzle ticket wallet jacket sweater ribbon
computer keyboard telephone rocket planet galaxy energy science history language alphabet
rhythm knowledge necessary beautiful restaurant chocolate umbrella adventure dictionary
photograph strawberry refrigerator encyclopedia extraordinary""".split()
)

TRANSLATION_LANGUAGES: Final = (
    "French", "Spanish", "German", "Russian", "Japanese", "Chinese", "Korean",
)  # fmt: skip
TRANSLATIONS: Final[dict[str, tuple[str, ...]]] = {
    cells[0]: tuple(cells[1:])
    for cells in (
        row.split("|")
        for row in """\
cat|chat|gato|Katze|кошка|猫|猫|고양이
dog|chien|perro|Hund|собака|犬|狗|개
horse|cheval|caballo|Pferd|лошадь|馬|马|말
bird|oiseau|pájaro|Vogel|птица|鳥|鸟|새
fish|poisson|pez|Fisch|рыба|魚|鱼|물고기
cow|vache|vaca|Kuh|корова|牛|牛|소
bear|ours|oso|Bär|медведь|熊|熊|곰
water|eau|agua|Wasser|вода|水|水|물
bread|pain|pan|Brot|хлеб|パン|面包|빵
milk|lait|leche|Milch|молоко|牛乳|牛奶|우유
cheese|fromage|queso|Käse|сыр|チーズ|奶酪|치즈
apple|pomme|manzana|Apfel|яблоко|りんご|苹果|사과
egg|œuf|huevo|Ei|яйцо|卵|鸡蛋|계란
tea|thé|té|Tee|чай|お茶|茶|차
coffee|café|café|Kaffee|кофе|コーヒー|咖啡|커피
house|maison|casa|Haus|дом|家|房子|집
door|porte|puerta|Tür|дверь|ドア|门|문
window|fenêtre|ventana|Fenster|окно|窓|窗户|창문
table|table|mesa|Tisch|стол|テーブル|桌子|테이블
book|livre|libro|Buch|книга|本|书|책
school|école|escuela|Schule|школа|学校|学校|학교
city|ville|ciudad|Stadt|город|都市|城市|도시
street|rue|calle|Straße|улица|通り|街道|거리
sun|soleil|sol|Sonne|солнце|太陽|太阳|태양
moon|lune|luna|Mond|луна|月|月亮|달
star|étoile|estrella|Stern|звезда|星|星星|별
sea|mer|mar|Meer|море|海|大海|바다
mountain|montagne|montaña|Berg|гора|山|山|산
river|fleuve|río|Fluss|река|川|河|강
forest|forêt|bosque|Wald|лес|森|森林|숲
tree|arbre|árbol|Baum|дерево|木|树|나무
flower|fleur|flor|Blume|цветок|花|花|꽃
rain|pluie|lluvia|Regen|дождь|雨|雨|비
snow|neige|nieve|Schnee|снег|雪|雪|눈
fire|feu|fuego|Feuer|огонь|火|火|불
wind|vent|viento|Wind|ветер|風|风|바람
friend|ami|amigo|Freund|друг|友達|朋友|친구
mother|mère|madre|Mutter|мать|母|母亲|어머니
father|père|padre|Vater|отец|父|父亲|아버지
child|enfant|niño|Kind|ребёнок|子供|孩子|아이
hand|main|mano|Hand|рука|手|手|손
heart|cœur|corazón|Herz|сердце|心|心|마음
night|nuit|noche|Nacht|ночь|夜|夜晚|밤
morning|matin|mañana|Morgen|утро|朝|早上|아침
summer|été|verano|Sommer|лето|夏|夏天|여름
winter|hiver|invierno|Winter|зима|冬|冬天|겨울
music|musique|música|Musik|музыка|音楽|音乐|음악
love|amour|amor|Liebe|любовь|愛|爱|사랑""".splitlines()
    )
}
"""English word to its word in each of TRANSLATION_LANGUAGES."""

NATIVE_PLACES: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
Tokyo|東京
Kyoto|京都
Osaka|大阪
Nagoya|名古屋
Yokohama|横浜
Sapporo|札幌
Beijing|北京
Shanghai|上海
Nanjing|南京
Guangzhou|广州
Shenzhen|深圳
Chengdu|成都
Hong Kong|香港
Seoul|서울
Busan|부산
Moscow|Москва
Sofia|София
Belgrade|Београд
Kyiv|Київ
Athens|Αθήνα
Cairo|القاهرة
Tehran|تهران
Jerusalem|ירושלים
New Delhi|नई दिल्ली
Tbilisi|თბილისი
Yerevan|Երևան
Hanoi|Hà Nội
Reykjavik|Reykjavík
Copenhagen|København
Gothenburg|Göteborg
Munich|München
Cologne|Köln
Nuremberg|Nürnberg
Zurich|Zürich
Geneva|Genève
Vienna|Wien
Prague|Praha
Warsaw|Warszawa
Krakow|Kraków
Lodz|Łódź
Bucharest|București
Istanbul|İstanbul
Malaga|Málaga
Lisbon|Lisboa
Rome|Roma
Florence|Firenze
Venice|Venezia
Naples|Napoli""".splitlines()
)
"""English name of a place to its name in the local language."""

ACCENTED_NAMES: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
Jose|José
Zoe|Zoë
Chloe|Chloé
Francois|François
Andre|André
Rene|René
Noel|Noël
Soren|Søren
Jurgen|Jürgen
Bjorn|Björn
Lukasz|Łukasz
Ines|Inés
Dvorak|Dvořák
Celine|Céline
Helene|Hélène
Jerome|Jérôme
Bronte|Brontë
Raul|Raúl
Joao|João
Asa|Åsa
Godel|Gödel
Schrodinger|Schrödinger
Erdos|Erdős
Poincare|Poincaré
Anais|Anaïs
Loic|Loïc
Ruben|Rubén
Tomas|Tomás
Agnes|Agnès
Seamus|Séamus
Sinead|Sinéad
Gokhan|Gökhan""".splitlines()
)
"""A name typed without accents to the same name with them."""

EMOJI: Final[dict[str, str]] = dict(
    row.split("|")
    for row in """\
cat|🐱
dog|🐶
fox|🦊
bear|🐻
panda|🐼
lion|🦁
tiger|🐯
frog|🐸
monkey|🐵
chicken|🐔
penguin|🐧
owl|🦉
wolf|🐺
unicorn|🦄
bee|🐝
snail|🐌
butterfly|🦋
ladybug|🐞
octopus|🐙
whale|🐳
dolphin|🐬
shark|🦈
crab|🦀
turtle|🐢
snake|🐍
elephant|🐘
camel|🐫
mouse|🐭
rabbit|🐰
cow|🐮
pig|🐷
rose|🌹
sunflower|🌻
cactus|🌵
mushroom|🍄
moon|🌙
star|⭐
rainbow|🌈
fire|🔥
snowman|⛄
apple|🍎
banana|🍌
grapes|🍇
strawberry|🍓
cherries|🍒
pineapple|🍍
avocado|🥑
carrot|🥕
corn|🌽
bread|🍞
cheese|🧀
pizza|🍕
burger|🍔
taco|🌮
cookie|🍪
cake|🎂
honey|🍯
coffee|☕
soccer ball|⚽
basketball|🏀
guitar|🎸
piano|🎹
trumpet|🎺
drum|🥁
car|🚗
bus|🚌
bicycle|🚲
train|🚂
airplane|✈️
rocket|🚀
ship|🚢
house|🏠
castle|🏰
key|🔑
book|📖
clock|⏰
umbrella|☔
balloon|🎈
gift|🎁
heart|💗
robot|🤖
ghost|👻""".splitlines()
)
"""Thing to its emoji; every emoji in it stands for one thing."""

PEOPLE: Final = tuple(
    """\
Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina
Victor Wendy Yuki Zoë José Chloé Björn Łukasz Inés Søren Amir Fatima Hugo""".split()
)
COLORS: Final = tuple(
    "red blue green yellow black white pink brown gray purple golden silver".split()
)
OBJECTS: Final = tuple(
    """\
kite boat hat ball lamp chair book bag car bike shirt cup box clock ring drum coat scarf key
pencil guitar umbrella bottle basket""".split()
)
PLACES: Final = tuple(
    """\
kitchen garden garage attic cellar library school station harbor market museum tower forest
castle office park""".split()
)

COMMON_WORDS: Final = tuple(
    """\
the a of to and in is it you that he was for on are with as his they be at one have this from or
had by hot but some what there we can out other were all your when up use word how said an each
she which do their time if will way about many then them would write like so these her long make
thing see him two has look more day could go come did my sound no most number who over know water
than call first people may down side been now find any new work part take get place made live
where after back little only round man year came show every good me give our under name very
through just form much great think say help low line before turn cause same mean differ move
right boy old too does tell sentence set three want air well also play small end put home read
hand port large spell add even land here must big high such follow act why ask men change went
light kind off need house picture try us again animal point mother world near build self earth
father head stand own page should country found answer school grow study still learn plant cover
food sun four thought let keep eye never last door between city tree cross since hard start
might story saw far sea draw left late run while press close night real life few stop open seem
together next white children begin got walk example ease paper often always music those both mark
book letter until mile river car feet care second group carry took rain eat room friend began idea
fish mountain north once base hear horse cut sure watch color face wood main enough plain girl
usual young ready above ever red list though feel talk bird soon body dog family direct pose leave
song measure state product black short numeral class wind question happen complete ship area half
rock order fire south problem piece told knew pass farm top whole king size heard best hour better
true during hundred remember step early hold west ground interest reach fast five sing listen six
table travel less morning ten simple several vowel toward war lay against pattern slow center love
person money serve appear road map science rule govern pull cold notice voice fall power town fine
certain fly unit lead cry dark machine note wait plan figure star box noun field rest correct able
pound done beauty drive stood contain front teach week final gave green quick develop sleep warm
free minute strong special mind behind clear tail produce fact street inch lot nothing course stay
wheel full force blue object decide surface deep moon island foot yet busy test record boat common
gold possible plane age dry wonder laugh thousand ago ran check game shape yes hot miss brought heat
snow bed bring sit perhaps fill east weight language among""".split()
)
"""Everyday English words for the sentences that surround a question."""


def foreign_words() -> dict[str, str]:
    """Words of TRANSLATIONS that mean one English word only, to that word."""
    seen: dict[str, set[str]] = {}
    for english, row in TRANSLATIONS.items():
        for word in row:
            seen.setdefault(word, set()).add(english)
    return {
        word: next(iter(meanings))
        for word, meanings in seen.items()
        if len(meanings) == 1 and word not in TRANSLATIONS
    }
